"""Each planted fault of :mod:`recording.faults` is found; without one there is nothing to find."""

import pytest
from distributed import ranks

from recording.faults import FAULTS
from recording.programs import PROGRAMS, play


def test_there_are_fifteen() -> None:
    assert len(FAULTS) >= 15


@pytest.mark.long
@pytest.mark.parametrize("name", list(FAULTS))
@ranks(2, interprets=True)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    options = {"steps": fault.steps, "elsewhere": fault.elsewhere}
    sound = play(PROGRAMS[fault.program], **options).recorder
    assert not sound.races, sound.report()
    before = {each.place for each in sound.waits if not each.age}
    with fault.plant():
        if fault.error is not None:
            with pytest.raises(RuntimeError, match=fault.error):
                play(PROGRAMS[fault.program], **options)
            return
        found = play(PROGRAMS[fault.program], **options).recorder
    if fault.is_wait:
        assert {each.place for each in found.waits if not each.age} - before
    else:
        assert found.races
