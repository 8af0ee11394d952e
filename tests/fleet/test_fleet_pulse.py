"""When a backend is taken for lost: only silence tells, and only a long one."""

from __future__ import annotations

from gateway.fleet.pulse import Pulse


class Patient:
    """A pulse that three questions in vain over 15 s end, a clock, and what was told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.changes = self.told = 0
        self.pulse = Pulse(3, 15.0, self._changed)
        self.pulse.listen(self, self._lost)

    def ask_in_vain(self, took_s: float = 5.0, sounds: int = 0) -> bool:
        """One question of a look. Whether the backend is lost then."""
        self.pulse.asked(self.now_s)
        for _ in range(sounds):
            self.pulse.heard()
        self.now_s += took_s
        self.pulse.missed()
        return self.pulse.judge(self.now_s)

    def _changed(self) -> None:
        self.changes += 1

    def _lost(self) -> None:
        self.told += 1


def test_one_question_in_vain_is_a_doubt_and_no_more() -> None:
    patient = Patient()
    assert not patient.ask_in_vain()
    assert patient.pulse.doubtful
    patient.pulse.answered()
    assert (patient.pulse.doubtful, patient.pulse.misses, patient.changes, patient.told) == (False, 0, 2, 0)


def test_three_in_a_row_over_long_enough_are_a_loss_and_who_waits_is_told_once() -> None:
    patient = Patient()
    assert [patient.ask_in_vain() for _ in range(4)] == [False, False, True, True]
    assert patient.told == 1
    assert patient.pulse.listeners == 0


def test_failures_that_come_fast_are_no_long_silence() -> None:
    """A route that flaps, a name that is not resolved for a moment: each says so at once."""
    patient = Patient()
    assert not any(patient.ask_in_vain(took_s=0.1) for _ in range(149))
    assert patient.ask_in_vain(took_s=0.2)


def test_bytes_for_a_request_are_a_sign_of_life() -> None:
    """A server may be too busy to answer a look, however often; its streams go on."""
    patient = Patient()
    assert not any(patient.ask_in_vain(sounds=1) for _ in range(20))
    assert not patient.pulse.doubtful
    assert [patient.ask_in_vain() for _ in range(2)] == [False, False]
    patient.pulse.heard()
    assert not patient.pulse.doubtful
    assert [patient.ask_in_vain() for _ in range(3)] == [False, False, False]
    assert patient.ask_in_vain()


def test_an_answer_between_begins_the_count_anew() -> None:
    patient = Patient()
    for _ in range(5):
        assert [patient.ask_in_vain() for _ in range(2)] == [False, False]
        patient.pulse.answered()


def test_a_late_answer_is_a_doubt_unless_something_else_is_heard() -> None:
    patient = Patient()
    patient.pulse.asked(0.0)
    patient.pulse.heard()
    patient.pulse.overdue()
    assert not patient.pulse.doubtful
    patient.pulse.answered()
    patient.pulse.asked(1.0)
    patient.pulse.overdue()
    assert patient.pulse.doubtful
    patient.pulse.heard()
    assert not patient.pulse.doubtful


def test_who_listens_to_a_lost_one_is_told_at_once_and_who_left_is_not_told() -> None:
    patient = Patient()
    patient.pulse.ignore(patient)
    while not patient.ask_in_vain():
        pass
    assert patient.told == 0
    patient.pulse.listen("late", patient._lost)
    assert patient.told == 1
    patient.pulse.answered()
    patient.pulse.listen("back", patient._lost)
    assert (patient.told, patient.pulse.listeners) == (1, 1)
