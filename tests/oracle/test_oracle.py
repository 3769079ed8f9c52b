"""The oracle finds what is wrong: rules with one mistake each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.matmul import MatrixProduct
from magis.ops.rule import Kernel, OpRule, Sample, T
from magis.ops.softmax import SoftmaxGradient
from magis.ops.view import View
from oracle import run, terms
from oracle.run import case_of, check
from oracle.terms import term_problems

PRODUCT = Sample("aten.mm.default", (T((3, 5)), T((5, 4))))


def problems(sample: Sample, rule: OpRule, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the oracle says when this rule describes the sample's operator."""
    case = case_of(sample)
    for module in (run, terms):
        monkeypatch.setattr(module, "rule_for", lambda op: rule)
    return [*check(case), *term_problems(case)]


class Correct(MatrixProduct):
    """No mistake."""


class Doubled(MatrixProduct):
    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return 2 * super().squared_terms(torch, call, tensors, output)


class SquaredSum(MatrixProduct):
    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.mm(*tensors) ** 2


class Silent(MatrixProduct):
    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return None


class TooManyTerms(MatrixProduct):
    def terms(self, call: Call, output: int) -> int:
        return super().terms(call, output) + 1


class Aliasing(MatrixProduct):
    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return (0,)


class Drawing(MatrixProduct):
    random = True


class WithoutLaunch(MatrixProduct):
    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return ()

    def flops(self, call: Call) -> int:
        return self.gemm(call).flops


class WithoutFlops(MatrixProduct):
    def flops(self, call: Call) -> int:
        return 0


def test_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(PRODUCT, Correct(), monkeypatch) == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Doubled, "brute force"),
        (SquaredSum, "brute force"),
        (Silent, "no squares of them are known"),
        (TooManyTerms, "sums 5 terms, the rule says 6"),
        (Aliasing, "the rule says 0"),
        (Drawing, "random generator"),
        (WithoutLaunch, "launches nothing"),
        (WithoutFlops, "0 flops"),
    ],
)
def test_one_mistake(rule: type[OpRule], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(PRODUCT, rule(), monkeypatch)
    assert any(words in problem for problem in found), found


class Copying(View):
    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return (None,)


class Repeatable(OpRule):
    """Takes an in-place write for a new tensor."""


class Lazy(SoftmaxGradient):
    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return tensors[0] * tensors[0] * tensors[1] * tensors[1]


def test_view_taken_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(Sample("aten._unsafe_view.default", (T((2, 3)), (6,))), Copying(), monkeypatch)
    assert "result 0 aliases input 0, the rule says None" in found


def test_write_taken_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(Sample("aten.add_.Tensor", (T((2, 3)), T((3,)))), Repeatable(), monkeypatch)
    assert any("may be recomputed" in problem for problem in found)


def test_half_of_the_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample("aten._softmax_backward_data.default", (T((2, 3)), T((2, 3)), 1, DType.F32))
    assert any("brute force" in problem for problem in problems(sample, Lazy(), monkeypatch))


def test_signs_show_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments too large to take apart are still compared on average."""
    case = case_of(PRODUCT)
    assert not term_problems(case, most=1)
    monkeypatch.setattr(terms, "rule_for", lambda op: Doubled())
    assert any("random signs" in problem for problem in term_problems(case, most=1))


def test_missing_rule() -> None:
    call = Call("aten.no_such.default", (), (), (), ())
    assert check(run.Case(call, [])) == ["aten.no_such.default has no rule"]


def test_integers_stay_below_their_bound() -> None:
    case = case_of(Sample("aten.embedding.default", (T((5, 4)), T((100,), DType.I64, 5))))
    assert int(case.tensors[1].min()) >= 0 and int(case.tensors[1].max()) == 4
    assert run.check_call(case.call, (2, 5)) == []
    assert run.check_call(case.call) == []
    assert torch.equal(run.case_for(case.call).tensors[1], torch.zeros(100, dtype=torch.int64))
