"""Thresholded messages: nothing is lost, sizes are known before, and thresholds let pass what they should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import console_of, run_ranks
from references import threshold_reference as reference
from small_run import CONFIG

from colonnade import Mesh, _native
from colonnade.config.plan import CodecConfig
from colonnade.config.run import build_config, override_settings
from colonnade.errors import ConfigError
from colonnade.plan.names import Thresholding
from colonnade.run.defaults import check_thresholded_sums
from colonnade.run.run import open_run
from colonnade.wire.thresholded import (
    SLOT_BYTES,
    ThresholdedShares,
    count_slots,
    density_of_step,
    split_into_blocks,
    thresholded_buffer_bytes,
)

SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 3e38, -3.4e38, 1.0, 65536.0]
BAD = [float("nan"), float("inf"), float("-inf")]


def draw_gradients(size, seed, special=()):
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=random) * 10 ** torch.randn(size, generator=random)
    places = torch.randint(size, (len(special),), generator=random)
    values[places] = torch.tensor(special)
    return values


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    density=st.sampled_from([0.01, 0.1, 0.3, 1.0]),
    threshold=st.sampled_from([0.0, 0.5, 2.0, 1e9]),
    scale=st.sampled_from([1.0, 8.0, 0.25]),
    step=st.integers(0, 1000),
    special=st.lists(st.sampled_from(SPECIAL + BAD), max_size=4),
)
def test_messages_have_the_bits_of_the_definition(sizes, density, threshold, scale, step, special):
    slots = count_slots([sizes], density)[0]
    values = draw_gradients(sum(sizes), step, special)
    residual = draw_gradients(sum(sizes), step + 1)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    thresholds = torch.full((len(sizes),), threshold)
    message = torch.empty(sum(slots), dtype=torch.int32)
    residual_after, passed = torch.empty_like(values), torch.zeros(len(sizes), dtype=torch.int64)
    _native.encode_thresholded(
        values,
        residual,
        scale,
        starts,
        torch.tensor(slots),
        thresholds,
        step,
        residual_after,
        passed,
        message,
    )
    wanted = reference.encode(values, residual, scale, sizes, slots, thresholds.tolist(), step)
    assert torch.equal(message, wanted[0]) and torch.equal(residual_after, wanted[1])
    decoded = torch.empty_like(values)
    _native.decode_thresholded(message, starts, torch.tensor(slots), decoded)
    assert torch.equal(decoded.nan_to_num(7), reference.decode(message, sizes, slots).nan_to_num(7))
    if wanted[2]:
        assert passed.tolist() == wanted[2]
        # What is sent and what is left are all there was, to the bit.
        assert torch.equal(decoded + residual_after * scale, values + residual * scale)
    else:
        assert decoded[0].isnan() and torch.equal(residual_after, residual)


def test_bytes_of_others_are_refused():
    message = torch.tensor([7 << 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="offset 7 in a block of 5"):
        _native.decode_thresholded(message, torch.tensor([0, 5]), torch.tensor([1]), torch.empty(5))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([256, 300, 65_536, 65_537, 200_001]), min_size=1, max_size=4),
    num_shares=st.integers(1, 7),
    density=st.sampled_from([0.001, 0.01, 0.25]),
)
def test_shares_have_messages_of_one_size(sizes, num_shares, density):
    blocks = split_into_blocks(sizes, num_shares)
    assert len({sum(of_share) for of_share in blocks}) == 1
    assert 0 <= sum(map(sum, blocks)) - sum(sizes) < num_shares
    assert 1 <= min(map(min, blocks)) and max(map(max, blocks)) <= 65_536
    ends = set(torch.tensor([size for of_share in blocks for size in of_share]).cumsum(0).tolist())
    assert set(torch.tensor(sizes[:-1]).cumsum(0).tolist()) <= ends  # no block has two tensors
    slots = count_slots(blocks, density)
    assert {sum(of_share) for of_share in slots} == {sum(slots[0])}
    size = thresholded_buffer_bytes(sizes, num_shares, density)
    assert size == SLOT_BYTES * sum(map(sum, slots))
    if max(sizes) > 65_000 and density == 0.01 and num_shares == 1:
        assert 4 * sum(sizes) / size > 90


def train(rule, steps, size=20_000, decay=0.0):
    """Send gradients of one rank for some steps; return the elements that pass in each, and the end."""
    shares = ThresholdedShares(rule, split_into_blocks([size], 1), range(1))
    scales = 10 ** (0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1)))
    sent, passed = torch.zeros(size, dtype=torch.float64), []
    total = torch.zeros(size, dtype=torch.float64)
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        gradients = scales * torch.randn(size, generator=random) * (1 - decay) ** step
        before = shares.residual.clone()
        message = shares.encode_with_residuals(gradients, 1.0, step)
        decoded = torch.empty(1, size)
        shares.decode(message, decoded, step)
        assert torch.equal(decoded + shares.residual, gradients + before)
        sent += decoded[0]
        total += gradients
        passed.append(int((decoded != 0).sum()))
    assert float((sent + shares.residual[0] - total).abs().max()) < 1e-3
    return passed


@pytest.mark.parametrize("decay", [0.0, 0.003])
def test_the_controller_lets_pass_what_it_should(decay):
    passed = train(Thresholding(0.01, 0), 400, decay=decay)
    assert sum(passed[150:]) / 250 == pytest.approx(200, rel=0.05)


def test_a_message_is_never_longer_than_its_slots():
    passed = train(Thresholding(0.01, 0), 150)
    assert max(passed) == 210  # the first thresholds let pass far more


def test_the_share_falls_geometrically():
    rule = Thresholding(0.01, 100)
    shares = [density_of_step(rule, step) for step in (0, 50, 99, 100, 10_000)]
    assert shares == pytest.approx([0.25, 0.05, 0.0103, 0.01, 0.01], rel=0.01)
    assert density_of_step(Thresholding(0.5, 10), 3) == 0.5


def test_elements_that_are_zero_are_not_sent_and_thaw_at_once():
    shares = ThresholdedShares(Thresholding(0.1, 0), [[300]], range(1))
    for step in range(3):
        message = shares.encode_with_residuals(torch.zeros(300), 1.0, step)
        assert not message.any() and not shares.residual.any()
    message = shares.encode_with_residuals(torch.arange(300.0), 1.0, 3)
    decoded = torch.empty(1, 300)
    shares.decode(message, decoded, 3)
    assert torch.nonzero(decoded[0]).flatten().tolist() == list(range(270, 300))


def test_settings_of_thresholded_sums():
    assert CodecConfig(dense="thresholded", dense_keep=1).choose_dense_codec() == "exact"
    assert CodecConfig(dense="thresholded").choose_dense_codec() == Thresholding(0.01, 1000)
    for setting in ({"dense_keep": 0}, {"dense_keep": 1.1}):
        with pytest.raises(ValueError):
            CodecConfig(dense="thresholded", **setting)


def open_short_run(mesh, folder, settings):
    """Open a run of few steps; return why it is refused, None if it is not."""
    thresholded = {"plan.codec.dense": "thresholded", "train.max_steps": 40}
    config = override_settings(build_config(CONFIG), thresholded | settings)
    try:
        open_run(config, mesh, folder, console=console_of(mesh)).close()
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "steps with plan.codec.dense=thresholded, wanted at least 5,000"),
        ({"plan.codec.dense_keep": 1, "dense.clip_norm": 1.0}, None),  # exact
        ({"dense.clip_norm": 1.0}, "got dense.clip_norm=1 with plan.codec.dense=thresholded"),
    ],
)
def test_runs_that_are_too_short_or_clip_are_refused_on_several_ranks(tmp_path, settings, words):
    for reason in run_ranks(2, open_short_run, tmp_path / "two", settings):
        assert reason is None if words is None else words in reason
    assert open_short_run(Mesh(), tmp_path / "one", settings) is None  # where nothing is sent


def test_a_refusal_names_a_share_that_fits():
    config = override_settings(build_config(CONFIG), {"plan.codec.dense": "thresholded"})
    with pytest.raises(ConfigError, match=r"dense_keep=0\.14, or plan\.codec\.dense=int8"):
        check_thresholded_sums(config, 367)
    check_thresholded_sums(config, 5000)
    check_thresholded_sums(config, None)
