import asyncio
from collections.abc import Callable

from asyncserve.loop.deadlines import MIN_ENTRIES, Deadlines


class Thing:
    has_ended = False


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a timer brings it about
        await asyncio.sleep(0)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_has_not_ended_is_called_back_about_in_order_and_the_rest_is_not() -> None:
    clock, passed = Clock(), list[Thing]()
    deadlines = Deadlines[Thing](clock, passed.append)
    first, ended, second, later = Thing(), Thing(), Thing(), Thing()
    deadlines.add(3600.0, later)
    clock.now_s = 10.0
    deadlines.add(9.0, second)
    deadlines.add(8.0, first)
    deadlines.add(7.0, ended)
    ended.has_ended = True
    assert passed == [], "never from within the call"
    await until(lambda: len(passed) == 2)
    await turn()
    assert passed == [first, second]
    assert len(deadlines) == 1
    deadlines.close()


async def test_one_that_ends_another_keeps_it_from_being_called_back_about() -> None:
    clock, passed = Clock(), list[Thing]()
    first, second = Thing(), Thing()

    def end_both(thing: Thing) -> None:
        passed.append(thing)
        first.has_ended = second.has_ended = True

    deadlines = Deadlines[Thing](clock, end_both)
    clock.now_s = 1.0
    deadlines.add(0.0, first)
    deadlines.add(0.5, second)
    await until(lambda: len(deadlines) == 0)
    assert passed == [first]


async def test_requests_that_ended_long_before_their_time_do_not_pile_up() -> None:
    deadlines = Deadlines[Thing](Clock(), lambda thing: None)
    for _ in range(20 * MIN_ENTRIES):
        thing = Thing()
        deadlines.add(3600.0, thing)
        thing.has_ended = True
    assert len(deadlines) <= 2 * MIN_ENTRIES
    deadlines.close()
    await turn()


async def test_one_thing_that_cannot_be_ended_keeps_no_other_from_its_deadline() -> None:
    passed: list[Thing] = []
    raised: list[Exception] = []
    broken, other = Thing(), Thing()

    def end(thing: Thing) -> None:
        if thing is broken:
            raise ZeroDivisionError
        passed.append(thing)

    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    clock = Clock()
    deadlines = Deadlines[Thing](clock, end)
    deadlines.add(1.0, broken)
    deadlines.add(2.0, other)
    clock.now_s = 3.0
    await until(lambda: bool(passed))
    assert passed == [other]
    assert [type(error) for error in raised] == [ZeroDivisionError]
