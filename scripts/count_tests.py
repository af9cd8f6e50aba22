"""A run of the test suite, counted by file, with its environment: what the README's table of tests is read from.

python -m pytest --junitxml=tests.xml; python scripts/count_tests.py tests.xml OUTPUT.json
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import torch

from qwen_patch.benchmarks.results import environment, write_json


def outcome(case: ET.Element) -> str:
    names = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return next((names[child.tag] for child in case if child.tag in names), "passed")


def main() -> None:
    source, target = sys.argv[1:]
    counts: dict[str, Counter] = {}
    suite = ET.parse(source).getroot().find("testsuite")
    for case in suite.iter("testcase"):
        if not case.attrib["classname"]:
            raise SystemExit(f"{case.attrib['name']} could not be collected: this run is not the whole suite")
        module = case.attrib["classname"].split(".")
        name = next(part for part in module if part.startswith("test_"))
        counts.setdefault(name, Counter())[outcome(case)] += 1
    document = {
        "benchmark": "tests",
        "environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "gpus": torch.cuda.device_count(),
        "seconds": float(suite.attrib["time"]),
        "files": {name: dict(sorted(counts[name].items())) for name in sorted(counts)},
    }
    write_json(Path(target), document)


if __name__ == "__main__":
    main()
