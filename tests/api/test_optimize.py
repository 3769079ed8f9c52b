"""`magis.optimize`: a training loop with the planned step ends with eager's weights."""

import copy
import pickle

import pytest
import torch

import magis
from magis import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def optimized(model, loss_fn, batch, **limits):
    return magis.optimize(model, loss_fn, batch, device="rtx3090", iterations=20, budget_s=None, **limits)


def deep(dropout=0.1):
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Dropout(dropout))]
    return torch.nn.Sequential(*layers)


def squares(model, x):
    return model(x).square().mean()


def twins(name):
    if zoo.model(name).requires:
        pytest.importorskip(zoo.model(name).requires)
    torch.manual_seed(0)
    model, loss_fn, batch = zoo.build(name)[:3]
    return model, copy.deepcopy(model), loss_fn, batch


@pytest.mark.parametrize("name", ["hf-bert-dropout-toy", "hf-gpt2-toy", "hf-resnet50-toy", "plain-mlp-toy"])
def test_a_training_loop_ends_with_eagers_weights_and_buffers(name) -> None:
    ours, theirs, loss_fn, batch = twins(name)
    step = optimized(ours, loss_fn, batch, memory_limit=0.85)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    for seed in range(3):
        torch.manual_seed(seed)
        loss = step(batch)
        loss.backward()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        reference = loss_fn(theirs, batch)
        reference.backward()
        assert torch.equal(torch.get_rng_state(), after)
        torch.testing.assert_close(loss, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values()):
        torch.testing.assert_close(mine, other, msg=key)
    assert step.met and step.memory_ratio <= 0.85


def test_gradients_accumulate_and_scale_as_eagers_do() -> None:
    ours, theirs = deep(), deep()
    batch = torch.randn(8, 16)
    step = optimized(ours, squares, batch)
    for run in (step, lambda x: squares(theirs, x)):
        torch.manual_seed(1)
        (run(batch) / 2).backward()
        (3 * run(batch)).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine.grad, other.grad)


def test_hooks_see_each_gradient_once() -> None:
    model = deep()
    weight = model[0].weight
    seen = []
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))
    step = optimized(model, squares, torch.ones(8, 16))
    torch.manual_seed(0)
    step(torch.ones(8, 16)).backward()
    twin = deep()
    torch.manual_seed(0)
    squares(twin, torch.ones(8, 16)).backward()
    torch.testing.assert_close(seen, [2 * twin[0].weight.grad])


def test_other_shapes_modes_and_frozen_parameters_are_planned_for_when_seen() -> None:
    model = deep()
    step = optimized(model, squares, torch.randn(8, 16), memory_limit=0.9)
    for change in (lambda: None, model.eval, lambda: model[0].weight.requires_grad_(False)):
        change()
        for batch in (torch.randn(8, 16), torch.randn(5, 16)):
            twin = copy.deepcopy(model)
            torch.manual_seed(2)
            step(batch).backward()
            torch.manual_seed(2)
            squares(twin, batch).backward()
            for mine, other in zip(model.parameters(), twin.parameters()):
                assert (mine.grad is None) == (other.grad is None)
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, other.grad)
            model.zero_grad()


def test_replaced_weights_are_seen() -> None:
    model, other = deep(0.0), deep(0.0)
    step = optimized(model, squares, torch.ones(8, 16))
    torch.nn.init.normal_(other[0].weight)
    model.load_state_dict(other.state_dict())
    model[3].weight = torch.nn.Parameter(torch.randn(16, 16))
    torch.testing.assert_close(step(torch.ones(8, 16)).detach(), squares(model, torch.ones(8, 16)).detach())


def test_slices_of_a_larger_tensor_and_shared_storages() -> None:
    tokens = torch.randint(0, 30, (4, 9))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30))

    def next_token(model, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    step = optimized(model, next_token, (tokens[:, :-1], tokens[:, 1:]))
    for _ in range(2):
        tokens = torch.randint(0, 30, (4, 9))
        batch = tokens[:, :-1], tokens[:, 1:]
        torch.testing.assert_close(step(batch).detach(), next_token(model, batch).detach())
    assert len(step._plans) == 1


def test_inputs_may_ask_for_their_gradient() -> None:
    model = deep(0.0)
    x, twin = torch.ones(8, 16, requires_grad=True), torch.ones(8, 16, requires_grad=True)
    optimized(model, squares, x)(x).backward()
    squares(model, twin).backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_inference_returns_what_the_model_returns() -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            return {"y": (x.tanh(), None), "n": 3}

    x = torch.randn(3, 4)
    found = optimized(Model(), None, x)(x)
    assert found["n"] == 3 and found["y"][1] is None
    assert torch.equal(found["y"][0], x.tanh()) and not found["y"][0].requires_grad


def test_autocast_around_the_call() -> None:
    model = deep(0.0)
    x = torch.randn(8, 16)
    step = optimized(model, squares, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(step(x).detach(), squares(model, x).detach())
    torch.testing.assert_close(step(x).detach(), squares(model, x).detach())


def test_without_gradients() -> None:
    model, x = deep(0.0), torch.ones(8, 16)
    step = optimized(model, squares, x)
    with torch.no_grad():
        loss = step(x)
    assert not loss.requires_grad and all(p.grad is None for p in model.parameters())
    loss = step(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="run the step again"):
        loss.backward()


def test_the_model_stays_as_it_is() -> None:
    model = deep()
    model.append(torch.nn.BatchNorm1d(16))
    model[0].weight.grad = torch.ones(16, 16)
    before = {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    x = torch.randn(8, 16)
    generator = torch.get_rng_state()
    optimized(model, squares, x, memory_limit=0.9)
    assert torch.equal(generator, torch.get_rng_state())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert before[name][0] == id(tensor) and torch.equal(before[name][1], tensor)
    assert torch.equal(model[0].weight.grad, torch.ones(16, 16)) and model.training


def test_limits_that_nothing_meets() -> None:
    with pytest.raises(magis.InfeasibleError, match="the lowest peak known is") as raised:
        optimized(deep(), squares, torch.ones(8, 16), memory_limit=1)
    assert raised.value.lowest_peak_bytes > 1
    with pytest.warns(UserWarning, match="the lowest peak known is"):
        step = optimized(deep(), squares, torch.ones(8, 16), memory_limit=1, strict=False)
    assert not step.met and "peak" in repr(step)
    for limits in ({"max_slowdown": 0.5}, {"memory_limit": "8 apples"}, {"memory_limit": 1.5}):
        with pytest.raises(magis.UsageError):
            optimized(deep(), squares, torch.ones(8, 16), **limits)
    with pytest.raises(magis.UsageError, match="scalar"):
        optimized(deep(), lambda model, x: model(x), torch.ones(8, 16))
    with pytest.raises(magis.UsageError, match="pickled"):
        pickle.dumps(step)
