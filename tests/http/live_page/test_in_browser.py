"""The live page in a browser, over the whole server with a fake device.

Every test also fails if the page writes an error to the console, raises, or asks anybody but its server.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from asyncserve.http.live_page.feed import SAMPLER
from asyncserve.http.live_page.sampler import PipelineSampler
from tests.fakes.tokenizer import EOS_ID, TURN_ID
from tests.http.live import MODEL, until
from tests.http.live_page.browser import running_browser
from tests.http.live_page.page_server import page_options
from tests.http.live_thread import LiveThread, live_thread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

ATTACK = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\n\n"
    "[a](javascript:hacked) **<b onmouseover=hacked>bold</b>** `<i>code</i>`\n\n"
    "```html\n<iframe src='javascript:parent.hacked = 3'></iframe>\n```\n"
    "- <svg onload='hacked=4'>\n# <u>head</u>"
)
ANSWERS = {
    "list": "Two **rivers**:\n\n1. the *Nile*\n2. the `Rhine`\n\n```python\nprint(1)\n```\nThat is all. ",
    "endless": "tick " * 400,
    "think": "<think>Let me <b>see</b>.</think>It is four.",
    "attack": ATTACK,
    "attack twice": f"<think>{ATTACK}</think>done",
}
HELD_AT = 20
"""The endless answer stops at this token, until it is stopped or the device goes on."""


class Script:
    """Answers by the last question; holds the device in the midst of the endless answer."""

    def __init__(self) -> None:
        self.hold: Callable[[], None] = lambda: None

    def __call__(self, token_ids: Sequence[int], prompt_len: int) -> int:
        prompt = list(token_ids[:prompt_len])
        answer_at = len(prompt) - 1 - prompt[::-1].index(TURN_ID)
        question_at = answer_at - 1 - prompt[answer_at - 1 :: -1].index(TURN_ID)
        question = bytes(each for each in prompt[question_at:answer_at] if each < 256).decode()
        text = ANSWERS.get(question.removeprefix("user:"), "Good.").encode()
        position = len(token_ids) - prompt_len
        if question == "user:endless" and position == HELD_AT:
            self.hold()
        return text[position] if position < len(text) else EOS_ID


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[LiveThread]:
    script = Script()
    info = {"max_model_len": 4096, "num_blocks": 2048, "max_num_batched_tokens": 256}
    options = page_options(next_token=script, info=info, check_plans=False, reasoning_parser="think")
    with live_thread(**options) as running:
        script.hold = running.live.executor.hold
        yield running


class Visit:
    """Pages of one test, and what they did that they should not."""

    def __init__(self, browser: Browser) -> None:
        self.faults: list[str] = []
        self.expected: list[str] = []
        self._browser = browser

    def open(self, url: str, **options: Any) -> Page:
        page = self._browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: self._note(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on(
            "request", lambda asked: None if asked.url.startswith((url, "data:")) else self._note(asked.url)
        )
        page.goto(f"{url}/")
        return page

    def _note(self, fault: str) -> None:
        if not any(words in fault for words in self.expected):
            self.faults.append(fault)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    visit = Visit(browser)
    yield visit
    for context in browser.contexts:
        context.close()
    assert not visit.faults


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def total_of(page: Page, name: str) -> Locator:
    return page.locator(".totals > div", has=page.get_by_text(name, exact=True)).locator("dd")


def total(page: Page, name: str) -> int:
    return int(total_of(page, name).inner_text().replace(",", ""))


async def until_unwatched(sampler: PipelineSampler) -> None:
    await until(lambda: not sampler.is_running)


def brightness(color: str) -> float:
    """Return the mean of a colour's parts, which are given as `rgb(1, 2, 3)`."""
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3


def test_an_answer_streams_in_with_its_figures_and_the_pipeline_shows_it(
    server: LiveThread, visit: Visit
) -> None:
    page = visit.open(server.live.url)
    expect(page.locator("#link")).to_have_text("Live")
    expect(page.get_by_role("heading", level=1)).to_have_text("asyncserve")
    expect(page.get_by_label("Model")).to_have_value(MODEL)
    before = total(page, "Output tokens")
    ask(page, "list")
    answer = page.locator(".answer").last
    # A token is a byte here; the last one is the end.
    num_tokens = len(ANSWERS["list"]) + 1
    figures = rf"^TTFT [\d.,]+ m?s · [\d.,]+ tokens/s · {num_tokens} tokens · prompt \d+"
    expect(answer.locator(".figures")).to_have_text(re.compile(figures))
    expect(answer.locator("ol > li")).to_have_text(["the Nile", "the Rhine"])
    expect(answer.locator("strong")).to_have_text("rivers")
    expect(answer.locator("pre")).to_have_text("print(1)")
    expect(page.locator("#announcer")).to_have_text(re.compile(r"That is all\. The answer is complete\.$"))
    expect(page.get_by_label("Message")).to_be_focused()
    expect(page.locator(".strip .bar").first).to_have_attribute("d", re.compile("^M"))
    page.wait_for_function(
        """before => [...document.querySelectorAll('.totals > div')].some(each =>
            each.firstChild.textContent === 'Output tokens'
            && Number(each.lastChild.textContent.replaceAll(',', '')) > before)""",
        arg=before,
    )
    names = page.locator(".queues .name").all_inner_texts()
    assert names == [each.name for each in server.live.engine.statistics().channels]
    # A second question is asked with what was said before.
    ask(page, "and?")
    expect(page.locator(".answer .body").last).to_have_text("Good.")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_escape_and_the_stop_button_end_an_answer(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    for stop in (
        lambda: page.keyboard.press("Escape"),
        lambda: page.get_by_role("button", name="Stop").click(),
    ):
        ask(page, "endless")
        answer = page.locator(".answer").last
        expect(answer.locator(".body")).to_contain_text("tick tick")
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        assert server.live.num_sequences == 1
        stop()
        expect(answer.locator(".figures")).to_have_text(re.compile(r"^TTFT .* about \d+ tokens · stopped$"))
        expect(answer).not_to_have_attribute("aria-busy", "true")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.get_by_label("Message")).to_be_focused()
        # The server has ended it, too, though the device has not finished its step.
        server.loop.call_soon_threadsafe(server.live.executor.resume)
        server.run(server.live.until_running(0))
    expect(total_of(page, "Left by clients")).to_have_text("2")


def test_what_the_model_says_is_text_whatever_it_says(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    for question in ("attack", "attack twice", ATTACK):
        ask(page, question)
        expect(page.locator(".answer").last.locator(".figures")).to_contain_text("prompt")
    assert page.locator(".message :is(script, img, iframe, svg, b, i, u, a)").count() == 0
    assert page.evaluate("window.hacked") is None
    first = page.locator(".answer .body").first
    for shown in (
        "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>",
        "[a](javascript:hacked)",
        "<b onmouseover=hacked>bold</b>",
        "<i>code</i>",
        "<iframe src='javascript:parent.hacked = 3'></iframe>",
        "<svg onload='hacked=4'>",
        "<u>head</u>",
    ):
        expect(first).to_contain_text(shown)
    expect(page.locator(".question").last).to_contain_text("<script>window.hacked = 1</script>")
    expect(page.locator(".thoughts")).to_contain_text("<script>window.hacked = 1</script>")


def test_reasoning_is_folded_away(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    ask(page, "think")
    expect(page.locator(".answer .body")).to_have_text("It is four.")
    thoughts = page.locator(".thoughts")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(thoughts).to_have_text("Let me <b>see</b>.")


def test_settings_are_sent_and_a_cut_answer_says_so(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    sent: list[Any] = []
    page.on("request", lambda asked: sent.append(asked.post_data_json) if asked.method == "POST" else None)
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System prompt").fill("Be brief.")
    ask(page, "list")
    expect(page.locator(".figures")).to_contain_text("cut: the limit of tokens is reached")
    assert (sent[0]["max_tokens"], sent[0]["temperature"]) == (3, 0.5)
    assert [each["role"] for each in sent[0]["messages"]] == ["system", "user"]


def test_errors_are_told_in_words_and_the_question_can_be_asked_again(
    server: LiveThread, visit: Visit
) -> None:
    visit.expected += ["429 (Too Many Requests)", "ERR_FAILED", "400 (Bad Request)"]
    page = visit.open(server.live.url)

    def full(route: Route) -> None:
        error = '{"error": {"message": "2048 wait", "type": "rate_limit_error", "param": null, "code": null}}'
        route.fulfill(status=429, body=error, headers={"Retry-After": "7"})

    broken = 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'
    for answer, words in (
        (full, "The server has no room just now. Try again in 7 s."),
        (lambda route: route.abort(), "The server does not answer."),
        (lambda route: route.fulfill(body=broken), "The connection broke: the answer is not complete."),
        (
            lambda route: route.fulfill(body=broken + 'data: {"error": {"message": "step 3 failed"}}\n\n'),
            "The answer broke off: step 3 failed",
        ),
    ):
        page.route("**/v1/chat/completions", answer, times=1)
        if page.get_by_role("button", name="Try again").count():
            page.get_by_role("button", name="Try again").click()
        else:
            ask(page, "list")
        expect(page.locator(".answer .bad")).to_have_text(words)
        expect(page.locator("#announcer")).to_contain_text(words)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer ol > li").first).to_have_text("the Nile")
    expect(page.locator(".message")).to_have_count(2)
    # The server's own words where they are for people.
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("999999")
    ask(page, "list")
    expect(page.locator(".answer .bad")).to_contain_text("max_tokens")


def test_a_server_with_keys_is_asked_with_the_key_and_it_stays_in_the_tab(visit: Visit) -> None:
    visit.expected += ["401 (Unauthorized)"]
    with live_thread(**page_options(next_token=Script(), api_keys=("secret",))) as server:
        page = visit.open(server.live.url)
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        expect(page.locator("#keyhelp")).to_contain_text("This server asks for a key.")
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#keyhelp")).to_contain_text("That is not one of this server's keys.")
        key.fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("Live")
        expect(key).to_be_hidden()
        ask(page, "anything")
        expect(page.locator(".answer .body")).to_have_text("Good.")
        assert page.evaluate("sessionStorage.getItem('key')") == "secret"
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert "secret" not in page.url
        page.get_by_text("Settings").click()
        page.get_by_role("button", name="Forget the API key").click()
        expect(key).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0


def test_the_feed_is_read_only_while_it_is_looked_at(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    sampler = server.live.runner.app[SAMPLER]
    expect(page.locator("#link")).to_have_text("Live")
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    expect(page.locator("#link")).to_have_text("Paused")
    expect(pause).to_have_attribute("aria-pressed", "true")
    server.run(until_unwatched(sampler))
    pause.click()
    expect(page.locator("#link")).to_have_text("Live")
    page.evaluate(
        """() => {
            Object.defineProperty(document, 'hidden', { value: true });
            document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    server.run(until_unwatched(sampler))


def test_the_page_follows_the_systems_theme_until_another_is_chosen(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url, color_scheme="dark")
    toggle = page.get_by_role("button", name="Dark theme")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    expect(toggle).to_have_attribute("aria-pressed", "true")
    page.emulate_media(color_scheme="light")
    expect(toggle).to_have_attribute("aria-pressed", "false")
    light = page.evaluate(background)
    assert brightness(dark) < 50 < 200 < brightness(light)
    toggle.click()
    assert page.evaluate(background) == dark
    page.reload()
    assert page.evaluate(background) == dark
    expect(toggle).to_have_attribute("aria-pressed", "true")
    toggle.click()
    assert page.evaluate("localStorage.length") == 0


def test_the_page_can_be_used_by_keyboard_alone(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    expect(page.locator("#link")).to_have_text("Live")
    walked = []
    for _ in range(13):
        page.keyboard.press("Tab")
        walked.append(
            page.evaluate(
                """() => {
                    const at = document.activeElement, style = getComputedStyle(at);
                    const seen = style.outlineStyle !== 'none' && at.getClientRects().length > 0;
                    return [at.id || at.textContent.trim(), seen];
                }"""
            )
        )
    assert [name for name, _ in walked] == [
        "Skip to the chat",
        "Skip to the pipeline",
        "API",
        "theme",
        "model",
        "new-chat",
        "conversation",
        "prompt",
        "Settings",
        "send",
        "pause",
        "panels",
        "The graphs as tables",
    ]
    assert all(seen for _, seen in walked), walked
    page.reload()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("li")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("st")
    expect(page.get_by_label("Message")).to_have_value("li\nst")
    page.keyboard.press("Enter")
    expect(page.locator(".question .body")).to_have_text("li\nst")


def test_axe_finds_nothing_that_keeps_people_out(server: LiveThread, visit: Visit) -> None:
    # The policy forbids the page to run what is put into it, axe too.
    page = visit.open(server.live.url, bypass_csp=True)
    for question in ("list", "think"):
        ask(page, question)
        expect(page.locator(".answer .figures").last).to_contain_text("prompt")
    page.get_by_text("Settings").click()
    page.get_by_text("The graphs as tables").click()
    page.get_by_text("Reasoning").click()
    expect(page.get_by_role("table")).to_have_count(2)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.emulate_media(color_scheme="dark")
    found = Axe().run(page, options={"runOnly": ["color-contrast"]})
    assert found.violations_count == 0, found.generate_report()


def test_nothing_hangs_over_the_edge_of_narrow_and_wide_screens(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url)
    ask(page, "list")
    expect(page.locator(".figures")).to_contain_text("prompt")
    expect(page.locator("#link")).to_have_text("Live")
    over = """() => [...document.querySelectorAll('main *')].filter(each =>
        each.getClientRects().length && each.getBoundingClientRect().right > innerWidth + 1
        && !each.closest('.scroll, pre, svg, .visually-hidden'))
        .map(each => each.className || each.tagName)"""
    for width in (360, 768, 1000, 2560):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        assert page.evaluate(over) == [], width


def test_who_wants_less_motion_gets_less(server: LiveThread, visit: Visit) -> None:
    page = visit.open(server.live.url, reduced_motion="reduce")
    ask(page, "endless")
    expect(page.locator(".answer .body")).to_contain_text("tick")
    mark = "getComputedStyle(document.querySelector('.answer[aria-busy] .body'), '::after').animationName"
    assert page.evaluate(mark) == "none"
    page.keyboard.press("Escape")
    server.loop.call_soon_threadsafe(server.live.executor.resume)
    server.run(server.live.until_running(0))
