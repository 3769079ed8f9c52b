"""`magis.optimize`: a training loop with the planned step ends with eager's weights."""

import copy
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import magis
from magis import zoo
from magis.api.optimize import MOST_PLANS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def optimized(model, loss_fn, batch, **limits):
    return magis.optimize(model, loss_fn, batch, device="rtx3090", iterations=5, budget_s=None, **limits)


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
    # not Adam: it makes a whole step of a gradient that is nothing but rounding
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, theirs)]
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
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, msg=key)
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


def test_scaled_gradients_replace_the_others_one_by_one() -> None:
    step = optimized(deep(), squares, torch.ones(8, 16))
    loss = step(torch.ones(8, 16))
    waiting = [weakref.ref(gradient) for gradient in loss.grad_fn.gradients]
    alive = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mul.Tensor and args[0].dim():
                alive.append(sum(gradient() is not None for gradient in waiting))
            return func(*args, **(kwargs or {}))

    with Products():
        (loss * 2).backward()
    assert alive == list(range(len(waiting), 0, -1))


def test_gradients_go_with_a_loss_that_is_dropped() -> None:
    loss = optimized(deep(), squares, torch.ones(8, 16))(torch.ones(8, 16))
    waiting = [weakref.ref(gradient) for gradient in loss.grad_fn.gradients]
    del loss
    assert waiting and all(gradient() is None for gradient in waiting)


def test_no_two_gradients_in_one_place() -> None:
    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(4))
            self.c, self.d = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (self.a.view(4) + self.b + self.c) * x

    model, x = Sums(), torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    seen = []
    model.d.register_hook(seen.append)  # of a parameter without a gradient
    optimized(model, lambda model, x: model(x).sum(), x)(x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(
        torch.cat([model.a.grad.flatten(), model.b.grad, model.c.grad]).norm(), torch.tensor(1.0)
    )
    assert model.d.grad is None and not seen


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


def test_a_batch_that_is_written() -> None:
    def halved(model, x):
        return squares(model, x.mul_(0.5))

    step = optimized(deep(0.0), halved, torch.ones(8, 16))
    x = torch.ones(8, 16)
    step(x)
    assert torch.equal(x, torch.full((8, 16), 0.5))
    with pytest.raises(magis.UsageError, match="clone"):
        step(torch.ones(9, 16)[1:])


def test_mappings_of_any_class_are_planned_for_once() -> None:
    transformers = pytest.importorskip("transformers")
    model = deep(0.0)

    def loss_fn(model, batch):
        return squares(model, batch["x"])

    step = optimized(model, loss_fn, transformers.BatchEncoding({"x": torch.randn(8, 16)}))
    for _ in range(2):
        batch = transformers.BatchEncoding({"x": torch.randn(8, 16)})
        torch.testing.assert_close(step(batch).detach(), loss_fn(model, batch).detach())
    assert len(step._plans) == 1


def test_what_is_no_tensor_is_part_of_the_plan() -> None:
    def loss_fn(model, batch):
        return (model(batch["x"]) * torch.as_tensor(batch["weights"]) * len(batch["name"])).square().mean()

    model, x, weights = deep(0.0), torch.randn(2000, 16), np.ones((2000, 1), np.float32)
    step = optimized(model, loss_fn, {"x": x, "weights": weights, "name": "a"})
    others = weights.copy()
    others[1000] = 30.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step({"x": x.clone(), "weights": weights.copy(), "name": "a"})
    for batch in ({"x": x, "weights": others, "name": "a"}, {"x": x, "weights": weights, "name": "ab"}):
        with pytest.warns(UserWarning, match="planning again, because the batch's (weights|name) is another") as found:
            loss = step(batch)
        assert found[0].filename == __file__
        torch.testing.assert_close(loss.detach(), loss_fn(model, batch).detach())
    model[2].p = 1.0
    with pytest.warns(UserWarning, match="because 2.p is another"):
        step(batch)
    model[0].register_forward_hook(lambda module, args, result: 2 * result)
    torch.testing.assert_close(step(batch).detach(), loss_fn(model, batch).detach())


def test_a_batch_that_the_loss_function_cannot_take_gives_its_error() -> None:
    step = optimized(deep(), lambda model, batch: squares(model, batch["x"]), {"x": torch.ones(8, 16)})
    with pytest.raises(KeyError, match="'x'"):
        step({"y": torch.ones(8, 16)})


def test_plans_that_are_kept() -> None:
    step = optimized(torch.nn.Linear(4, 1), squares, torch.ones(1, 4))
    for length in range(2, MOST_PLANS + 3):
        step(torch.ones(length, 4))
    assert len(step._plans) == MOST_PLANS


def test_a_share_of_the_peak_allows_a_larger_batch_the_same_share() -> None:
    step = optimized(deep(), squares, torch.ones(64, 16), memory_limit=0.9)
    for length in (256, 1):
        step(torch.ones(length, 16))
        assert next(reversed(step._plans.values())).planned.met


def test_inputs_may_ask_for_their_gradient() -> None:
    model, before = deep(0.0), torch.nn.Linear(16, 16)
    found = []
    step = optimized(model, squares, torch.ones(8, 16, requires_grad=True))
    for run in (step, lambda x: squares(model, x)):
        x = torch.ones(8, 16, requires_grad=True)
        run(x).backward()
        run(before(x)).backward()  # computed with gradients
        found.append([x.grad, before.weight.grad.clone()])
        before.zero_grad()
    torch.testing.assert_close(*found)


def test_distributed_data_parallel(tmp_path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store")), rank=0, world_size=1
    )
    try:
        inner, twin, reduced = deep(), deep(), []
        model = DistributedDataParallel(inner)

        def average(state, bucket):
            reduced.extend(bucket.parameters())
            future = torch.futures.Future()
            future.set_result(bucket.buffer() * 2)
            return future

        model.register_comm_hook(None, average)
        step = optimized(model, squares, torch.ones(8, 16), memory_limit=0.9)
        torch.manual_seed(0)
        step(torch.ones(8, 16)).backward()
        assert len(reduced) == len(list(inner.parameters())) and model.module is inner
        with model.no_sync():
            step(torch.ones(8, 16)).backward()
        torch.manual_seed(0)
        (2 * squares(twin, torch.ones(8, 16))).backward()
        squares(twin, torch.ones(8, 16)).backward()
        for mine, other in zip(inner.parameters(), twin.parameters()):
            torch.testing.assert_close(mine.grad, other.grad)
        with pytest.raises(magis.UsageError, match="whole model"):
            optimized(torch.nn.Sequential(model), squares, torch.ones(8, 16))
    finally:
        torch.distributed.destroy_process_group()


def test_gradient_scaler_and_scheduler() -> None:
    ours, theirs = deep(), deep()
    step = optimized(ours, squares, torch.ones(8, 16), memory_limit=0.9)
    for model, run in ((ours, step), (theirs, lambda x: squares(theirs, x))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
        torch.manual_seed(0)
        for _ in range(3):
            scaler.scale(run(torch.ones(8, 16))).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine, other)


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


def test_planned_and_run_in_inference_mode() -> None:
    model, x = deep(0.0), torch.ones(8, 16)
    with torch.inference_mode():
        step = optimized(model, squares, x)
        torch.testing.assert_close(step(x), squares(model, x))
    step(x).backward()
    assert model[0].weight.grad is not None


def test_hooks_that_a_model_puts_on_itself_at_its_first_call() -> None:
    class Recording(torch.nn.Sequential):
        def forward(self, x):
            if not hasattr(self, "installed"):
                self.installed, self.seen = True, []
                for module in self:
                    module.register_forward_hook(lambda module, args, result: self.seen.append(result))
            self.seen.clear()
            super().forward(x)
            return torch.stack(self.seen)

    model = Recording(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    x = torch.randn(8, 16)
    step = optimized(model, squares, x)
    assert not any(module._forward_hooks for module in model)
    loss = step(x)
    torch.testing.assert_close(loss.detach(), squares(model, x).detach())
    assert len(model.seen) == 2


def test_a_model_that_cannot_be_captured_stays_as_it_is() -> None:
    model = deep().append(torch.nn.BatchNorm1d(16))
    model[0].weight.register_hook(lambda gradient: gradient)
    hooks, before, x = model[0].weight._backward_hooks, copy.deepcopy(model.state_dict()), torch.randn(8, 16)
    generator = torch.get_rng_state()

    def branching(model, x):
        loss = squares(model, torch.nn.functional.dropout(x))
        return loss if loss.item() > 0 else -loss

    with pytest.raises(magis.CaptureError, match="item"):
        optimized(model, branching, x)
    assert torch.equal(generator, torch.get_rng_state()) and model[0].weight._backward_hooks is hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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
