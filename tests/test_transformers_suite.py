"""Transformers' own common tests, run on stock models and on models that are patched the moment they exist.

The bar: whatever a stock model passes, the patched one passes. What stock itself skips here (no GPU, no flash-attn, not
a composite model ...) or fails is skipped, with that reason.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers
from models import FAMILIES
from transformers import AutoConfig, PreTrainedModel
from transformers_suite import CausalLMTester, common_tests

import qwen_patch
from qwen_patch import PatchError
from qwen_patch.modules import Patched

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: they say nothing about the patch
common = common_tests()
# model_type -> what the names of its classes begin with. The VL families have another kind of tester.
PREFIXES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "mistral": "Mistral"}
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def suite_of(family: str) -> type[unittest.TestCase]:
    prefix, config_class = PREFIXES[family], type(AutoConfig.for_model(family))

    def set_up(self: unittest.TestCase) -> None:
        self.model_tester = CausalLMTester(self, config_class, **FAMILIES[family])

    bases = (common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase)
    classes = tuple(getattr(transformers, prefix + head) for head in HEADS)
    return type(f"{prefix}ModelTest", bases, {"all_model_classes": classes, "setUp": set_up})


SUITES = {family: suite_of(family) for family in PREFIXES}
SLOW_FAMILIES = ("qwen3_moe", "mistral")  # the others' code over again, but for the experts
CASES = [
    pytest.param(family, name, id=f"{family}-{name}", marks=[pytest.mark.slow] if family in SLOW_FAMILIES else [])
    for family, suite in SUITES.items()
    for name in unittest.TestLoader().getTestCaseNames(suite)
]


@contextmanager
def every_model_patched() -> Iterator[None]:
    """Inside, a model is patched at the end of its construction, and after its weights have been loaded."""
    post_init, from_pretrained = PreTrainedModel.post_init, PreTrainedModel.from_pretrained.__func__

    def patch(model: PreTrainedModel) -> None:
        try:
            qwen_patch.patch_model(model)
        except PatchError:
            assert any(p.device.type == "meta" for p in model.parameters())  # from_pretrained builds it so, then loads

    @functools.wraps(post_init)
    def patched_post_init(self: PreTrainedModel) -> None:
        post_init(self)
        patch(self)

    @functools.wraps(from_pretrained)
    def patched_from_pretrained(cls: type[PreTrainedModel], *args: object, **kwargs: object) -> object:
        loaded = from_pretrained(cls, *args, **kwargs)
        patch(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    with (
        mock.patch.object(PreTrainedModel, "post_init", patched_post_init),
        mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(patched_from_pretrained)),
    ):
        yield


def run(family: str, name: str) -> unittest.TestResult:
    result = unittest.TestResult()
    torch.manual_seed(0)
    SUITES[family](name).run(result)
    return result


@pytest.fixture(autouse=True)
def _logs_as_the_suite_expects_them():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()  # some tests read the warnings
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_patched_model_passes_what_a_stock_model_passes(family, name):
    stock = run(family, name)
    if stock.skipped:
        pytest.skip(f"stock: {stock.skipped[0][1]}")
    if not stock.wasSuccessful():
        pytest.skip(f"stock fails: {(stock.errors + stock.failures)[0][1].strip().splitlines()[-1]}")
    with every_model_patched():
        patched = run(family, name)
    assert not patched.skipped, f"stock passes, the patched model is skipped: {patched.skipped[0][1]}"
    assert patched.wasSuccessful(), (patched.errors + patched.failures)[0][1]


@pytest.mark.parametrize("family", SUITES)
def test_models_are_patched_as_soon_as_they_exist(family, tmp_path):
    """What the comparison above rests on."""
    suite = SUITES[family]("test_num_layers_is_small")
    suite.setUp()
    config = suite.model_tester.get_config()
    with every_model_patched():
        for model_class in suite.all_model_classes:
            model = model_class(config)
            model.save_pretrained(tmp_path)
            for patched in (model, model_class.from_pretrained(tmp_path), model_class._from_config(config)):
                plan = qwen_patch.explain(patched)
                assert plan.replaced
                expected = len(plan.replaced) + (plan.generation.replacement is not None)
                assert sum(isinstance(m, Patched) for m in patched.modules()) == expected
    assert not any(isinstance(m, Patched) for m in suite.all_model_classes[1](config).modules())
