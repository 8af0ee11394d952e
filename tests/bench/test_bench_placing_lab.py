"""The placing laboratory: its clients, baselines, scenarios and figures."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.placing import tables
from bench.placing.baselines import AtOnce, FlowControl
from bench.placing.jobs import PLACERS, Job, play
from bench.placing.lab import Lab
from bench.placing.lru import RecentBlocks
from bench.placing.oracle import Boundless, Pooled
from bench.placing.policies import CacheAware, EndpointPicker, NoGateway, RoundRobin, Seen
from bench.placing.replay import by_characters, conversations
from bench.placing.report import fair_shares, figures, jain
from bench.placing.scenarios import NAMES, Scenario, engine, scenario, without_flood
from bench.placing.terms import Fleet, Run
from bench.placing.traffic import FLOOD, KINDS, Load, Request, Session, Traffic
from gateway.simulator.blocks import block_hashes


def played(found: Scenario, policy: str = "least") -> Run:
    lab = Lab(found.fleet, found.load, 1, found.window_tokens)
    return lab.run(PLACERS[policy](lab, found.told))


def request_of(prompt: list[int], number: int = 1) -> Request:
    session = Session(number, KINDS["chat"], "key", 1, prompt, random.Random(1), 32768, 1.0)
    return Request(number, session, prompt, block_hashes(prompt, 16, []), [1, 2], 0.0, len(prompt), 2)


# Traffic


def test_every_policy_meets_the_same_sessions() -> None:
    load = scenario("uniform", 2.0, 120.0).load
    one, other = (
        [
            (moment_s, session.key, session.turns_left, session.random.random())
            for moment_s, session in traffic.arrivals()
        ]
        for traffic in (Traffic(load, 7, 32768), Traffic(load, 7, 32768))
    )
    assert one == other


def test_a_flood_changes_nothing_about_the_others_and_is_ten_times_another_key() -> None:
    found = scenario("flood", 8.0, 900.0)
    with_flood = list(Traffic(found.load, 1, 32768).arrivals())
    without = list(Traffic(without_flood(found).load, 1, 32768).arrivals())
    others = [(moment_s, session.key) for moment_s, session in with_flood if session.key != FLOOD]
    assert others == [(moment_s, session.key) for moment_s, session in without]
    chats = Counter(session.key for _, session in with_flood if session.kind.name == "chat")
    usual = [count for key, count in chats.items() if key != FLOOD]
    assert chats[FLOOD] > 0.8 * 10 * sum(usual) / len(usual)


def test_agents_compact_at_the_window_they_believe_in() -> None:
    load = Load({"agent": 1.0}, 60.0, windows=((8192, 1.0), (131072, 1.0)))
    traffic = Traffic(load, 1, 32768)
    most: dict[int, int] = Counter()
    for _, session in traffic.arrivals():
        while session.turns_left > 0:
            request = traffic.request(session, 0.0)
            most[session.window_tokens] = max(most[session.window_tokens], request.prompt_tokens)
            traffic.answered(request)
    assert most[8192] < 8192
    assert 32768 < most[131072] < 131072


# Clients


def test_an_agent_that_is_told_its_prompt_is_too_long_compacts_and_others_give_up() -> None:
    fleet = Fleet((engine(8192, 49152),))
    agents = Lab(fleet, Load({"agent": 0.05}, 120.0), 1, 32768)
    run = agents.run(AtOnce(agents, NoGateway()))
    assert sum(item.overflows for item in run.outcomes) > 0
    assert all(item.finished_s is not None for item in run.outcomes if item.overflows == 1)
    rag = Lab(fleet, Load({"rag": 0.2}, 120.0), 1, 32768)
    told = [item for item in rag.run(AtOnce(rag, NoGateway())).outcomes if item.overflows]
    assert told
    assert all(item.refused and item.overflows == 1 for item in told)


def test_where_a_backend_dies_clients_of_it_lose_requests_and_a_router_tries_elsewhere() -> None:
    found = scenario("dies", 3.0, 180.0)
    assert sum(item.lost for item in played(found, "none").outcomes) > 0
    for policy in ("round-robin", "kvgate"):
        run = played(found, policy)
        assert all(item.finished_s is not None for item in run.outcomes), policy


def test_foreign_requests_are_nobodys_but_fill_a_backend() -> None:
    found = scenario("foreign", 2.0, 120.0)
    run = played(found)
    assert all(item.request.session.kind.name != "foreign" for item in run.outcomes)
    busy = figures(run, 120.0).first_token_s[2]
    calm = figures(played(scenario("uniform", 2.0, 120.0)), 120.0).first_token_s[2]
    assert busy > calm


# Baselines


def test_only_those_told_the_windows_leave_out_backends_that_are_too_small() -> None:
    found = scenario("mixed", 3.0, 120.0)
    assert sum(item.overflows for item in played(found, "round-robin").outcomes) > 0
    told = scenario("mixed-told", 3.0, 120.0)
    assert sum(item.overflows for item in played(told, "round-robin").outcomes) == 0


def test_the_picker_knows_only_the_first_blocks_of_a_prompt_unless_tuned() -> None:
    start = list(range(5000))
    one, other = request_of([*start, *range(10000, 15000)]), request_of([*start, *range(20000, 25000)])
    backends = [Seen(0, 32768, 8191), Seen(1, 32768, 8191)]

    def chosen(most_blocks: int) -> set[int]:
        found = set()
        for seed in range(10):
            picker = EndpointPicker("picker", [8191, 8191], most_blocks, seed=seed)
            picker.placed(one, 0)
            picker.placed(other, 1)
            found.add(picker.place(one, backends, 0.0))
        return found

    assert chosen(256) == {0, 1}  # both look alike: a tie
    assert chosen(1 << 20) == {0}


def test_the_cache_aware_router_turns_to_the_least_loaded_when_out_of_balance() -> None:
    policy = CacheAware("sglang", 2, 32, 1.1, 0.5)
    request = request_of(list(range(1000)))
    policy.placed(request, 0)
    assert policy.place(request, [Seen(0, 32768, 8191, in_flight=32), Seen(1, 32768, 8191)], 0.0) == 0
    assert policy.place(request, [Seen(0, 32768, 8191, in_flight=33), Seen(1, 32768, 8191)], 0.0) == 1


def test_flow_control_holds_back_while_the_pool_is_saturated() -> None:
    found = scenario("uniform", 20.0, 60.0)
    lab = Lab(found.fleet, found.load, 1, found.window_tokens)
    placer = FlowControl(lab, RoundRobin())
    for seen in lab.seen:
        seen.waiting = 5
    request = request_of(list(range(100)))
    placer.arrived(request, 0.0)
    assert [seen.in_flight for seen in lab.seen] == [0, 0, 0, 0]


def test_gauges_are_those_of_the_last_scrape_though_nobody_scrapes() -> None:
    lab = Lab(Fleet((engine(32768, 131072),)), Load({}, 10.0), 1, 32768)
    policy = RoundRobin()
    policy.scrape_s = 1.0
    placer = AtOnce(lab, policy)
    lab.run(placer)
    lab.now_s = 1.5
    lab.observe(1.5)
    lab.send(request_of(list(range(100))), 0, 1.5)
    lab.observe(1.5)
    assert lab.seen[0].running == 0  # it was scraped at 1 s
    lab.now_s = 2.0
    lab.observe(2.0)
    assert lab.seen[0].running == 1


# Oracles


@given(st.integers(0, 8), st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30))
def test_the_least_recently_used_blocks_are_forgotten(capacity: int, prompts: list[list[int]]) -> None:
    recent, plain = RecentBlocks(capacity), OrderedDict[int, None]()
    for text in prompts:
        prompt = block_hashes(text, 1, [])
        assert recent.leading(prompt) == next((i for i, value in enumerate(prompt) if value not in plain), len(prompt))
        recent.use(prompt)
        for value in reversed(prompt):
            plain[value] = None
            plain.move_to_end(value)
        while len(plain) > capacity:
            plain.popitem(last=False)
        assert len(recent) == len(plain)
        assert all(value in recent for value in plain)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=20))
def test_a_pooled_cache_without_bound_is_the_boundless_one(prompts: list[list[int]]) -> None:
    boundless, pooled, small = Boundless(), Pooled(10_000), Pooled(4)
    for prompt in prompts:
        hashes = block_hashes(prompt, 1, [])
        found = boundless.asked(hashes)
        assert pooled.asked(hashes) == found
        assert small.asked(hashes) <= found


# Figures


@given(st.dictionaries(st.text(max_size=2), st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_fair_shares_give_all_away_and_nobody_more_than_asked(demands: dict[str, float], part: float) -> None:
    total = part * sum(demands.values())
    shares = fair_shares(demands, total)
    assert sum(shares.values()) == pytest.approx(total)
    most = max(shares.values())
    for key, share in shares.items():
        assert share <= demands[key] * (1 + 1e-9)
        assert share == pytest.approx(demands[key]) or share == pytest.approx(most)


def test_crowding_out_is_unfair_and_serving_little_is_not() -> None:
    asked = {"a": 10.0, "b": 10.0, "flood": 100.0}

    def index(served: dict[str, float]) -> float:
        fair = fair_shares(asked, sum(served.values()))
        return jain(served[key] / fair[key] for key in asked)

    assert index({"a": 10.0, "b": 10.0, "flood": 40.0}) == pytest.approx(1.0)
    assert index({"a": 2.0, "b": 2.0, "flood": 2.0}) == pytest.approx(1.0)
    assert index({"a": 2.0, "b": 2.0, "flood": 56.0}) < 0.7


@pytest.mark.parametrize("name", [name for name in NAMES if name != "replay"])
def test_every_scenario_and_policy_comes_to_an_end(name: str) -> None:
    for policy in ("none", "picker-precise", "picker-flow", "overlap", "kvgate"):
        found = play(Job(scenario(name, 2.0, 40.0), 2.0, policy, 1)).figures
        assert found.requests > 0
        assert found.finished + found.refused + found.lost <= found.requests
        assert 0 <= found.hit_share <= 1
        assert found.balance >= 1


def test_a_large_fleet_is_as_loaded_as_a_small_one() -> None:
    small, large = (scenario("uniform", 2.0, 60.0, backends=count).load.rates["chat"] for count in (4, 64))
    assert large == 16 * small


def test_the_verdict_compares_with_the_best_of_each_figure() -> None:
    ours = play(Job(scenario("uniform", 1.0, 40.0), 1.0, "kvgate", 1)).figures
    slow = replace(ours, policy="slow", goodput=ours.goodput / 2, preemptions=100, first_token_s=(1.0, 1.0, 100.0))
    quick = replace(ours, policy="quick", goodput=ours.goodput / 4, preemptions=200, first_token_s=(1.0, 1.0, 10.0))
    ours = replace(ours, preemptions=1, first_token_s=(1.0, 1.0, 6.0))
    goals = {goal.name: goal for goal in tables.verdict([slow, quick, ours])}
    assert (goals["preemptions"].best_policy, goals["preemptions"].met) == ("slow", True)
    assert (goals["p99 TTFT"].best_policy, goals["p99 TTFT"].met) == ("quick", False)
    assert (goals["p99 TTFT, best by goodput"].best_policy, goals["p99 TTFT, best by goodput"].met) == ("slow", True)
    assert (goals["goodput"].best_policy, goals["goodput"].met) == ("slow", True)
    assert "| p99 TTFT |" in tables.verdict_table(list(goals.values()), markdown=True)


# Replays

CHAT = [
    {"role": "system", "content": "Be of help. " * 50},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "look"}}]},
    {"role": "tool", "content": "A cat."},
    {"role": "assistant", "content": "It is a cat."},
    {"role": "user", "content": "Thanks."},
]


def test_a_conversation_is_a_request_for_each_answer(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps(CHAT) + "\n")
    one, other = conversations(file, by_characters)
    assert one == other
    assert [turn.tool for turn in one] == [True, False]
    assert len(one[0].new) == 2 * 4 + 150 + 3  # two messages, and an id for every four characters


def test_conversations_that_begin_alike_share_blocks_and_are_said_anew_when_played_again(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    second = [CHAT[0], {"role": "user", "content": "Who?"}, *CHAT[2:]]
    file.write_text("\n".join(json.dumps(item) for item in (CHAT, second)))
    load = Load({"replay": 1.0}, 10.0, conversations=conversations(file, by_characters))
    traffic = Traffic(load, 1, 32768)
    sessions = [session for _, session in traffic.arrivals()]
    assert len(sessions) > 2
    first, other, again = (traffic.request(session, 0.0) for session in sessions[:3])
    assert first.hashes[:9] == other.hashes[:9]
    assert again.prompt == first.prompt
    for request in (first, again):
        traffic.answered(request)
    assert sessions[0].tokens[: first.prompt_tokens] == sessions[2].tokens[: first.prompt_tokens]
    assert sessions[0].tokens[first.prompt_tokens :] != sessions[2].tokens[first.prompt_tokens :]
    found = scenario("replay", 1.0, 60.0, conversations=load.conversations)
    assert figures(played(found), 60.0).finished > 20


def test_what_is_not_a_conversation_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(CHAT) + "\n{}\n")
    with pytest.raises(ValueError, match="line 2"):
        conversations(file, by_characters)
    with pytest.raises(ValueError, match="needs recorded"):
        scenario("replay", 1.0, 60.0)
