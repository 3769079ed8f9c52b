"""The proof passes what is right and catches what is wrong."""

from collections import UserDict

import pytest
import torch

from magis import zoo
from magis.api.prove import exact_results, prove
from magis.backend.runtime import compile_routine
from magis.capture.capture import capture
from magis.capture.workload import Workload, workload
from magis.errors import InvalidGraphError
from magis.fission.tree import Program
from magis.ir.structure import readers_before_write
from magis.ir.verify import verify
from magis.lower.lower import lower


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def _mlp(update=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
    )
    batch = (torch.randn(24, 16), torch.randn(24, 4))
    return Workload(model, lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), batch, update, "mlp")


def _compiled(made, schedule=None):
    captured = capture(made)
    return captured, compile_routine(lower(Program(captured.graph), schedule or captured.schedule))


def _tampered(captured, step, name, change):
    """The step with one of its results changed."""
    place = captured.graph.output_names.index(name)

    def run(inputs):
        results = list(step(inputs))
        results[place] = change(results[place])
        return tuple(results)

    return run


def test_right_numbers_pass_with_dropout_and_batch_norm():
    made = _mlp()
    captured, step = _compiled(made)
    result = prove(made, captured, step)
    assert result.ok
    assert result.failures == ()
    assert result.tensors == 1 + 6 + 6 + 3 + 2  # loss, gradients, parameters, buffers, batch
    assert result.batch == 24


@pytest.mark.parametrize("change", [torch.zeros_like, lambda g: 2 * g, lambda g: g * float("nan"), lambda g: g + 1e-4])
@pytest.mark.parametrize("name", ["grad:3.bias", "grad:0.weight", "loss"])
def test_a_changed_result_fails(name, change):
    made = _mlp()
    captured, step = _compiled(made)
    result = prove(made, captured, _tampered(captured, step, name, change))
    assert not result.ok
    assert [line.split(":")[0] for line in result.failures] == [name.split(":")[0]]


def test_a_gradient_that_is_zero_by_mathematics_may_be_noise():
    """A bias in front of batch normalisation has no effect: eager's gradient for it is rounding noise."""
    made = _mlp()
    captured, step = _compiled(made)
    assert prove(made, captured, _tampered(captured, step, "grad:0.bias", torch.zeros_like)).ok
    assert not prove(made, captured, _tampered(captured, step, "grad:0.bias", torch.ones_like)).ok


def test_a_skipped_random_draw_fails():
    made = _mlp()
    captured, step = _compiled(made)

    def run(inputs):
        torch.rand(1)
        return step(inputs)

    result = prove(made, captured, run)
    assert any("generator" in line for line in result.failures)


@pytest.mark.parametrize("times", [0, 2])
def test_a_stale_or_repeated_update_fails(times):
    made = _mlp("sgd-inplace")
    captured, step = _compiled(made)
    weight = made.model[3].weight

    def run(inputs):
        before = weight.detach().clone()
        results = step(inputs)
        weight.copy_(before + times * (weight - before))
        return results

    result = prove(made, captured, run)
    assert [line.split(" ")[0] for line in result.failures] == ["parameter:3.weight:"]


@pytest.mark.parametrize("factor", [0.0, -1.0, 3.0])
def test_an_update_far_smaller_than_its_weight_is_seen(factor):
    """A wrong update of a few units in the weight's last place must not hide behind the weight."""
    made = _mlp("sgd-inplace")
    with torch.no_grad():
        made.model[3].weight.mul_(30)
    captured, step = _compiled(made)
    weight = made.model[3].weight

    def run(inputs):
        before = weight.detach().clone()
        results = step(inputs)
        weight.copy_(before + factor * (weight - before))
        return results

    assert prove(made, captured, step).ok
    assert not prove(made, captured, run).ok


def test_numbers_where_eager_has_none_fail():
    made = _mlp()
    captured, step = _compiled(made)
    broken = Workload(made.model, lambda m, b: made.loss_fn(m, b) * float("nan"), made.batch, None, "broken")
    assert not prove(broken, captured, step).ok


def test_a_result_that_is_a_buffer_is_compared_as_it_was_returned():
    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x):
            self.average.mul_(0.9).add_(x.mean(0))
            return self.average

    made = Workload(Average(), None, (torch.randn(8, 4),), None, "average")
    captured, step = _compiled(made)
    assert prove(made, captured, step).failures == ()


def test_reading_a_weight_after_its_update_fails():
    """The likeliest silent wrong gradient: an operator that should have run before the weight was overwritten."""
    made = _mlp("sgd-inplace")
    captured = capture(made)
    graph = captured.graph
    writers = readers_before_write(graph)
    weight = next(node.id for node in graph.inputs if node.name == "3.weight")
    readers = next(found for writer, found in writers.items() if graph.nodes[writer].inputs[0].node == weight)
    late = {max(n for n in readers if graph.nodes[n].op == "aten.mm.default")}
    for node in graph.nodes.values():
        if late & {value.node for value in node.inputs}:
            late.add(node.id)
    order = (*(n for n in captured.schedule if n not in late), *(n for n in captured.schedule if n in late))
    with pytest.raises(InvalidGraphError, match="no read after write"):
        verify(graph, order)
    step = compile_routine(lower(Program(graph), order))
    assert not prove(made, captured, step).ok


def test_updated_weights_are_proven_and_put_back():
    made = _mlp("sgd-inplace")
    captured, step = _compiled(made)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    assert prove(made, captured, step).ok
    assert all(torch.equal(before[name], tensor) for name, tensor in made.model.state_dict().items())


def test_a_doubled_bias_gradient_of_a_transformer_fails():
    pytest.importorskip("transformers")
    made = workload(zoo.build("hf-bert-dropout-toy"), "hf-bert-dropout-toy")
    captured, step = _compiled(made)
    name = "grad:bert.encoder.layer.0.output.dense.bias"
    assert prove(made, captured, step).ok
    assert not prove(made, captured, _tampered(captured, step, name, lambda g: 2 * g)).ok
    assert not prove(made, captured, _tampered(captured, step, name, torch.zeros_like)).ok


class Masked(torch.nn.Module):
    """Logits of which some are out of the question; what they are made of comes along."""

    def __init__(self, masked):
        super().__init__()
        self.logits, self.masked = torch.nn.Linear(8, 8), masked

    def forward(self, x):
        return {"logits": self.masked(self.logits(x)), "sign": x.sign()}


def _above(y):
    return torch.ones_like(y).triu(1)


MASKED = {
    "filled": lambda y: y.masked_fill(_above(y).bool(), float("-inf")),
    "added": lambda y: y + torch.zeros_like(y).masked_fill(_above(y).bool(), float("-inf")),
    "normalised": lambda y: torch.log_softmax(y.masked_fill(_above(y).bool(), float("-inf")), -1),
    "both signs": lambda y: y.masked_fill(_above(y).bool(), float("inf")) * torch.tensor([1.0, -1.0] * 4),
    "all": lambda y: torch.full_like(y, float("-inf")),
}


def _masked(name):
    torch.manual_seed(0)
    return Workload(Masked(MASKED[name]), None, (torch.randn(8, 8),), None, "masked")


@pytest.mark.parametrize("name", MASKED)
def test_infinities_where_eager_has_them_are_equal(name):
    made = _masked(name)
    captured, step = _compiled(made)
    result = prove(made, captured, step)
    assert result.failures == ()
    assert result.max_rel_error == 0.0


def _set(value, place):
    def change(tensor):
        changed = tensor.clone()
        changed[place] = value
        return changed

    return change


INFINITE = float("inf")
CHANGES = {
    "NaN for a number": _set(float("nan"), (1, 0)),
    "NaN for an infinity": _set(float("nan"), (0, 1)),
    "infinity for a number": _set(-INFINITE, (1, 0)),
    "number for an infinity": _set(-1e30, (0, 1)),
    "the other infinity": _set(INFINITE, (0, 1)),
    "another number": _set(0.75, (7, 0)),
    "all infinite": lambda tensor: torch.full_like(tensor, -INFINITE),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("name", ["filled", "added", "normalised"])
def test_other_infinities_and_numbers_fail(name, change):
    made = _masked(name)
    captured, step = _compiled(made)
    result = prove(made, captured, _tampered(captured, step, "output:logits", change))
    assert [line.split(": ")[0] for line in result.failures] == ["output:logits"]


def test_rounding_beside_infinities_passes():
    made = _masked("filled")
    captured, step = _compiled(made)
    tampered = _tampered(captured, step, "output:logits", lambda tensor: tensor * (1 + 2**-23))
    result = prove(made, captured, tampered)
    assert result.failures == () and 0 < result.max_rel_error < 1e-6


def test_an_infinite_loss_and_its_gradients_fail_though_eager_has_them_too():
    made = _mlp()
    endless = Workload(made.model, lambda m, b: made.loss_fn(m, b) * INFINITE, made.batch, None, "endless")
    captured, step = _compiled(endless)
    failed = {line.split(": ")[0] for line in prove(endless, captured, step).failures}
    assert {"loss", "grad:3.bias"} <= failed


def test_an_infinite_weight_fails():
    made = _mlp("sgd-inplace")
    captured, step = _compiled(made)
    weight = made.model[3].weight

    def run(inputs):
        results = step(inputs)
        weight[0, 0] = INFINITE
        return results

    failures = prove(made, captured, run).failures
    assert [line.split(": ")[0] for line in failures] == ["parameter:3.weight"]


def test_an_infinite_buffer_that_the_step_updates_fails():
    made = Workload(torch.nn.BatchNorm1d(4), None, (torch.full((8, 4), INFINITE),), None, "buffers")
    captured, step = _compiled(made)
    assert any(line.startswith("buffer:running_mean") for line in prove(made, captured, step).failures)


def test_exact_results_of_a_batch_that_is_a_mapping():
    x = torch.randn(8, 16)
    made = Workload(_mlp().model, lambda m, b: m(b.data["x"]).square().mean(), UserDict(x=x, y=x), None, "mapping")
    assert exact_results(made)["loss"].dtype == torch.float64
    assert made.batch["x"] is x
