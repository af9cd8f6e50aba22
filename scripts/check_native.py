"""Check what was built: libraries on the stable ABI, with machine code for the promised GPUs. Needs no GPU.

python scripts/check_native.py [--wheel FILE]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "qwen_patch" / "_native"
# C++ names of libtorch and c10, or the C API of Python: if one is needed, the library is tied to one torch or Python.
UNSTABLE = re.compile(r"_ZN?K?(2at|3c10|5torch)\w*|Py[A-Z_]\w*")


def undefined_symbols(library: Path) -> list[str]:
    command = ["nm", "-D", "--undefined-only", str(library)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].split("@")[0] for line in output.splitlines()]


def problems(folder: Path) -> list[str]:
    found = []
    for kind in ("cpu", "cuda"):
        library = folder / f"libqwen_patch_{kind}.so"
        if not library.exists():
            found.append(f"{library.name} is missing")
            continue
        found += [f"{library.name} needs {s}" for s in undefined_symbols(library) if UNSTABLE.fullmatch(s)]
        if kind == "cuda":
            code = library.read_bytes()
            found += [f"no code for {arch} in {library.name}" for arch in (b"sm_80", b"sm_90a") if arch not in code]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="check the libraries inside this wheel, and its tag")
    wheel = parser.parse_args().wheel
    if wheel is None:
        found = problems(NATIVE)
    else:
        unpacked = wheel.parent / "unpacked"
        zipfile.ZipFile(wheel).extractall(unpacked)
        found = problems(unpacked / "qwen_patch" / "_native")
        found += [] if "-py3-none-linux" in wheel.name else [f"{wheel.name} is tied to one Python"]
        code = "import qwen_patch, qwen_patch.ops as o; print(qwen_patch.__file__); assert o.LIBRARIES['cpu'].loaded"
        subprocess.run(
            [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); {code}"], check=True
        )
    for line in found:
        print(line, file=sys.stderr)
    if found:
        raise SystemExit(1)
    print("the native libraries are as promised")


if __name__ == "__main__":
    main()
