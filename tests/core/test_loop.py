"""The loop over chunks: the same run, evaluated, recorded, resumed, refused, diverged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import checkpoint as checkpoints
from commjax.core import compiled, runner
from commjax.devices.mesh import client_mesh, shard
from tests import registry
from tests.registry import build

pytestmark = pytest.mark.slow

CASE = build("ef-bv m-nice")
KEY = jax.random.key(11)


def loop(rounds, key=KEY, algorithm=CASE.algorithm, hparams=CASE.hparams, data=CASE.data, state=None, **options):
    state = CASE.init() if state is None else state
    return runner.loop(key, algorithm, hparams, state, data, rounds, **{"progress": False, **options})


def same_bits(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def same_record(found, wanted):
    assert found.metrics.keys() == wanted.metrics.keys() and found.evaluations.keys() == wanted.evaluations.keys()
    same_bits((found.metrics, found.evaluations), (wanted.metrics, wanted.evaluations))


@pytest.mark.parametrize("chunk", [1, 3, 10, 100])
def test_the_loop_is_the_run_bit_for_bit_whatever_the_chunk(chunk):
    state, metrics = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 10)
    found, record = loop(10, chunk=chunk)
    same_bits(found, state)
    for name, values in metrics._asdict().items():
        assert record.metrics[name].dtype == np.float64
        np.testing.assert_array_equal(record.metrics[name], values)


def test_evaluations_are_taken_at_the_start_and_after_each_chunk_with_their_rounds():
    seen = []

    def evaluate(state):
        params = state.server.params
        seen.append(np.asarray(params))
        return {"norm": float(np.linalg.norm(params)), "array": jnp.sum(params)}

    state, record = loop(7, chunk=3, evaluate=evaluate)
    assert record.evaluations["round"].tolist() == [0, 3, 6, 7]
    np.testing.assert_array_equal(seen[0], CASE.params)
    np.testing.assert_array_equal(seen[-1], state.server.params)
    assert record.evaluations["norm"].tolist() == [float(np.linalg.norm(x)) for x in seen]
    assert record.evaluations["array"].shape == (4,) and "norm" not in record.metrics


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_resumed_loop_gives_the_whole_state_and_record_without_evaluating_twice(tmp_path, stop):
    calls = []

    def evaluate(state):
        calls.append(1)
        return {"norm": jnp.linalg.norm(state.server.params)}

    options = {"chunk": 2, "evaluate": evaluate}
    whole, record = loop(6, **options)
    calls.clear()
    loop(stop, checkpoint=tmp_path / "run", **options)
    state, resumed = loop(6, checkpoint=tmp_path / "run", **options)
    same_bits(state, whole)
    same_record(resumed, record)
    assert len(calls) == 4 and resumed.evaluations["round"].tolist() == [0, 2, 4, 6]


def test_a_complete_checkpoint_is_returned_as_it_is_without_running_or_writing(tmp_path):
    path = tmp_path / "run"
    whole, record = loop(4, chunk=2, checkpoint=path)
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    state, again = loop(4, chunk=2, checkpoint=path)
    same_bits(state, whole)
    same_record(again, record)
    assert path.read_bytes() == content and path.stat().st_mtime_ns == written


def test_the_loop_changes_none_of_its_inputs(tmp_path):
    state, config = CASE.init(), {"d": 11}
    before = jax.tree.map(np.array, (state, CASE.data))
    for _ in range(2):
        loop(2, state=state, chunk=1, config=config, checkpoint=tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, (state, CASE.data), before)
    assert config == {"d": 11}


def test_the_record_knows_its_settings():
    _, record = loop(2, config={"d": 11, "kept": 2.0}, bits_init=704.0)
    assert record.config == {"num_rounds": 2, "hparams": CASE.hparams, "d": 11, "kept": 2.0}
    assert record.bits_up()[0] == 704.0 and record.bits_up("32k").tolist() == [0.0, 64.0]


def test_a_loop_of_no_rounds_has_an_empty_record_that_can_still_be_asked(tmp_path):
    state, record = loop(0, evaluate=lambda x: {"one": 1.0})
    same_bits(state, CASE.init())
    assert record.bits_up().shape == record.bits_down().shape == (0,) and record.first_below(1.0) is None
    assert record.evaluations["round"].tolist() == [0] and len(record.table().splitlines()) == 1


def test_a_loop_goes_on_from_the_round_of_its_state():
    middle, _ = loop(2, chunk=2)
    state, record = loop(4, state=middle, chunk=2)
    same_bits(state, loop(4, chunk=2)[0])
    assert len(record.metrics["loss"]) == 2


def test_fewer_rounds_than_were_done_are_refused(tmp_path):
    path = tmp_path / "run"
    state, _ = loop(4, checkpoint=path)
    with pytest.raises(ValueError, match=r"num_rounds is 3, but .*run is in round 4"):
        loop(3, checkpoint=path)
    with pytest.raises(ValueError, match="num_rounds is 3, but the state is in round 4"):
        loop(3, state=state)


OTHER = {
    "hparams": {"hparams": CASE.hparams._replace(gamma=0.01)},
    "key": {"key": jax.random.key(12)},
    "data": {"data": CASE.data._replace(c=CASE.data.c.at[3, 2].add(1e-9))},
    "start": {"state": CASE.algorithm.init(CASE.params.at[0].add(1e-9), CASE.ids)},
    "program": {"algorithm": ef_bv.ef_bv(registry.VALUE_AND_GRAD, compressors.top_k(2))},
}


@pytest.mark.parametrize("what", OTHER)
def test_the_checkpoint_of_another_run_is_refused_by_name_and_kept(tmp_path, what):
    path = tmp_path / "run"
    loop(2, checkpoint=path)
    content = path.read_bytes()
    with pytest.raises(checkpoints.CheckpointError, match=f"another run: {what} is .* there, .* here"):
        loop(4, checkpoint=path, **OTHER[what])
    assert path.read_bytes() == content


def test_a_loss_that_closes_over_other_numbers_is_another_program(tmp_path):
    def algorithm(offset):
        return ef_bv.gd(jax.value_and_grad(lambda x, data: jnp.sum((x - offset - data.c) ** 2)))

    loop(1, algorithm=algorithm(np.arange(11.0)), checkpoint=tmp_path / "run")
    loop(2, algorithm=algorithm(np.arange(11.0)), checkpoint=tmp_path / "run")
    with pytest.raises(checkpoints.CheckpointError, match="program is"):
        loop(3, algorithm=algorithm(np.arange(11.0) + 1), checkpoint=tmp_path / "run")


def test_a_program_with_a_callback_or_a_key_inside_is_recognised_again(tmp_path):
    def algorithm(seed):
        noise, host = jax.random.key(seed), lambda x: np.asarray(x)

        def value_and_grad(x, data):
            loss = jax.pure_callback(host, jax.ShapeDtypeStruct((), x.dtype), jnp.sum(x), vmap_method="sequential")
            return loss, x + jax.random.normal(noise, x.shape)

        return ef_bv.gd(value_and_grad)

    loop(1, algorithm=algorithm(0), checkpoint=tmp_path / "run")
    state, _ = loop(2, algorithm=algorithm(0), checkpoint=tmp_path / "run")
    assert state.server.round == 2


def test_hyperparameters_of_equal_value_resume_whether_numbers_or_arrays(tmp_path):
    loop(1, checkpoint=tmp_path / "run")
    state, _ = loop(2, checkpoint=tmp_path / "run", hparams=jax.tree.map(jnp.asarray, CASE.hparams))
    same_bits(state, loop(2, chunk=1)[0])


def test_a_run_on_several_devices_resumes_on_them(tmp_path):
    start = shard(CASE.init(), client_mesh(4))
    loop(2, state=start, checkpoint=tmp_path / "run")
    state, _ = loop(4, state=start, chunk=2, checkpoint=tmp_path / "run")
    assert len(state.clients.shift.devices()) == 4
    same_bits(state, loop(4, state=start, chunk=2)[0])


DIVERGING = CASE.hparams._replace(gamma=1e60)


def test_divergence_names_the_round_and_the_hparams():
    with pytest.raises(runner.DivergedError, match=r"not finite in round 3 with HParams\(gamma=1e\+60.*\)$"):
        loop(20, hparams=DIVERGING, chunk=5)
    with pytest.raises(runner.DivergedError, match=r"not finite in round 3 with"):
        loop(20, hparams=DIVERGING, chunk=1)


def test_divergence_leaves_the_last_good_checkpoint_as_it_was(tmp_path):
    path = tmp_path / "run"
    loop(2, hparams=DIVERGING, chunk=1, checkpoint=path)
    content = path.read_bytes()
    with pytest.raises(runner.DivergedError, match=r"round 3 .*; .*run is that of round 2"):
        loop(20, hparams=DIVERGING, chunk=5, checkpoint=path)
    assert path.read_bytes() == content and [one.name for one in tmp_path.iterdir()] == ["run"]


def test_divergence_in_the_first_chunk_does_not_speak_of_a_checkpoint_that_never_was(tmp_path):
    with pytest.raises(runner.DivergedError) as caught:
        loop(20, hparams=DIVERGING, chunk=5, checkpoint=tmp_path / "run")
    assert "run is that of" not in str(caught.value) and not any(tmp_path.iterdir())


def test_a_sweep_in_chunks_is_the_sweep_and_resumes_and_outlives_a_diverging_setting(tmp_path):
    settings = runner.stack([CASE.hparams, DIVERGING])
    keys = jax.random.split(KEY, 3)
    options = {
        "key": keys,
        "hparams": settings,
        "chunk": 2,
        "evaluate": lambda state: {"first": state.server.params[..., 0], "one": 1.0},
    }
    state, metrics = runner.sweep(keys, CASE.algorithm, settings, CASE.init(), CASE.data, 6)
    whole, record = loop(6, **options)
    np.testing.assert_array_equal(whole.server.params, state.server.params)
    np.testing.assert_array_equal(record.metrics["loss"], metrics.loss)
    assert record.metrics["loss"].shape == (2, 3, 6) and record.evaluations["first"].shape == (2, 3, 4)
    assert record.evaluations["one"].tolist() == [1.0] * 4 and record.evaluations["round"].tolist() == [
        0,
        2,
        4,
        6,
    ]
    np.testing.assert_array_equal(record.evaluations["first"][..., -1], whole.server.params[..., 0])
    assert np.isfinite(record.metrics["loss"][0]).all() and not np.isfinite(record.metrics["loss"][1, :, -1]).any()
    loop(2, checkpoint=tmp_path / "run", **options)
    resumed, again = loop(6, checkpoint=tmp_path / "run", **options)
    same_bits(resumed, whole)
    same_record(again, record)


@pytest.mark.parametrize(
    "chunk, rounds, message",
    [
        (0, 3, "chunk must be at least 1, got 0"),
        (-1, 3, "chunk must be at least 1, got -1"),
        (5, -1, "num_rounds must be an integer of at least 0, got -1"),
    ],
)
def test_bad_numbers_of_rounds_are_refused(chunk, rounds, message):
    with pytest.raises(ValueError, match=message):
        loop(rounds, chunk=chunk)


def test_what_cannot_be_one_number_a_round_is_refused():
    with pytest.raises(ValueError, match="eval/params must be one number"):
        loop(1, evaluate=lambda state: {"params": state.server.params})
    with pytest.raises(ValueError, match="evaluate must not return 'round'"):
        loop(1, evaluate=lambda params: {"round": 1.0})
    vector = runner.observe(CASE.algorithm, params=lambda state, batch: state.server.params)
    with pytest.raises(ValueError, match=r"params must be one number .* got shape \(1, 11\)"):
        loop(1, algorithm=vector)


def test_progress_goes_to_stderr_and_can_be_silenced(capsys):
    loop(2, progress=True, label="tiny")
    out, err = capsys.readouterr()
    assert out == "" and "tiny: 2/2" in err and "loss" in err
    loop(2, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_chunk_writes_over_its_start_and_the_caller_keeps_his_state():
    state = CASE.init()
    before = jax.tree.map(np.array, state)
    loop(4, chunk=2, state=state)
    same_bits(state, before)
    inputs = (KEY, CASE.algorithm, CASE.hparams, state, CASE.data, 2)
    memory = compiled.run_in_place.lower(*inputs).compile().memory_analysis()
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.8 * rows  # all but a few scalars
    assert compiled.compiled_run.lower(*inputs).compile().memory_analysis().alias_size_in_bytes == 0
