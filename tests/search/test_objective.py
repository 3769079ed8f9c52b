"""What makes one state better than another."""

from magis.search.objective import Objective


def test_within_a_latency_the_least_peak_wins_then_the_least_latency():
    within = Objective(max_latency_s=2.0)
    order = [(2.0, 5), (1.0, 6), (2.0, 6), (2.1, 3), (2.1, 4), (2.2, 1)]  # (seconds, bytes), best first
    assert sorted(order, key=lambda it: within.key(*it)) == order


def test_within_a_peak_the_least_latency_wins_then_the_least_peak():
    within = Objective(max_peak_bytes=10)
    order = [(1.0, 10), (2.0, 3), (2.0, 4), (0.5, 11), (0.6, 11), (0.1, 12)]
    assert sorted(order, key=lambda it: within.key(*it)) == order


def test_with_both_limits_the_least_peak_within_the_latency_wins():
    both = Objective(max_latency_s=2.0, max_peak_bytes=10)
    order = [(2.0, 5), (1.0, 9), (1.0, 11), (2.1, 5)]
    assert sorted(order, key=lambda it: both.key(*it)) == order


def test_slack_makes_the_best_a_bar_that_near_states_pass():
    within = Objective(max_latency_s=2.0)
    bar = within.key(1.0, 100, slack=1.1)
    assert within.key(1.9, 109) < bar
    assert not within.key(1.9, 111) < bar
    beyond = within.key(3.0, 100, slack=1.1)
    assert within.key(3.2, 500) < beyond
    assert not within.key(3.4, 1) < beyond


def test_limits_are_met_up_to_their_last_byte_and_second():
    both = Objective(2.0, 10)
    assert both.met(2.0, 10)
    assert not both.met(2.0001, 10)
    assert not both.met(2.0, 11)
    assert Objective(max_peak_bytes=10).met(9e9, 10)
    assert Objective(max_latency_s=2.0).met(2.0, 10**15)
    assert Objective().met(1.0, 1)
