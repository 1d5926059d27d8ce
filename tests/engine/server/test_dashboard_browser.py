"""The page at `/` in a real browser: what it shows, its chat, and every state it can be in."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from chromium import Browser, Page, open_browser
from hal_engine.api import EngineDeadError, OpCallCount
from hal_process import ServerProcess, serving
from page_accessibility import accessibility_problems, focus_order

KEY = "a-very-secret-key"
HOSTILE = '<img src=x onerror="document.title=1">\u202e</script>'
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHOWN = "!document.getElementById('live').hidden"
LAST_TEXT = "(document.querySelector('.turn:last-child .text')?.textContent ?? '')"
CAPTION = "(document.querySelector('.turn:last-child .caption')?.textContent ?? '')"
IS_DONE = "document.getElementById('chat-stop').hidden"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


def _op(number: int, **changes: Any) -> dict[str, Any]:
    reason = {"what": "head_dim", "required": "at most 64", "found": "80", "kind": "argument"}
    op = {
        "site": f"layers.*.proj{number}",
        "layers": [0, 1, 2],
        "op": "gemm",
        "phase": "any",
        "tokens": [1, 16],
        "choice": "cpu.gemm.onednn",
        "tier": "native",
        "distribution": "halstack",
        "estimate_us": 12.5,
        "roofline_us": 3.25,
        "roofline_by": "memory",
        "semantic_notes": [],
        "lost": None,
        "waiver": None,
        "rejected": [{"name": "cpu.gemm.fused", "tier": "native", "reasons": [reason]}],
    }
    return op | changes


def _device(name: str, number: int) -> dict[str, Any]:
    return {
        "device_id": f"cpu:{number}",
        "name": name,
        "arch": "x86_64-v4",
        "vendor": "cpu",
        "memory_bytes": 16 * 2**30,
        "memory_bandwidth": 20e9,
        "peak_flops": {"float32": 1.5e11},
        "evidence": {"memory_bytes": {"confidence": "probed"}},
    }


def _plan(engine: Any, *ops: dict[str, Any], name: str = "Some CPU") -> None:
    document = {
        "hash": engine.plan_hash(),
        "devices": [_device(name, 0), _device(name, 1)],
        "notes": ["a note about the plan"],
        "ops": list(ops) or [_op(i) for i in range(80)],
    }
    engine.plan_json = lambda: document


def _open(browser: Browser, server: Any, **options: Any) -> Page:
    page = browser.open_page(f"{server.url}/", **options)
    page.wait_for(SHOWN)
    page.wait_for("!document.getElementById('plan').innerText.includes('Reading the plan')")
    return page


def _say(page: Page, text: str) -> None:
    page.evaluate("document.getElementById('chat-input').focus()")
    page.type_text(text)
    page.press("Enter")


def _is_clean(page: Page, server: Any) -> None:
    """No complaint of the console, and no word with anybody but the server."""
    assert page.problems == []
    assert page.requests
    assert {url for url in page.requests if not url.startswith(f"{server.url}/")} == set()
    page.close()


# ---- a real engine ----


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    tiny_models.make_tiny_model("qwen3", folder, seed=torch.seed() % 2**31)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    _never_ends(folder)
    with serving(folder, "--set", "engine.num_blocks=64") as running:
        yield running


def _never_ends(folder: Path) -> None:
    """Random weights may say the end at once, and an answer without a token has no rates."""
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        config.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(config))


def test_a_real_server_live(browser: Browser, tiny_server: ServerProcess) -> None:
    page = _open(browser, tiny_server)
    with tiny_server.http() as http:
        plan = http.get("/v1/hal/plan").json()
    assert page.evaluate("document.getElementById('plan-hash').textContent") == plan["hash"]
    text = page.text()
    assert plan["devices"][0]["name"] in text
    assert "tiny-chat" in text
    assert "tiny-chat · ready" in page.evaluate("document.title")
    assert f"{len(plan['ops'])} decisions" in text
    calls = page.evaluate("document.getElementById('calls').innerText")
    for op in plan["ops"]:
        assert op["choice"] in calls
    tokens = "Number(document.querySelector('.figure .below').textContent.replace(/\\D/g, ''))"
    before = page.evaluate(tokens)
    page.evaluate("document.getElementById('chat-options').open = true")
    page.evaluate("document.getElementById('chat-max').value = 16")
    _say(page, "Hello there")
    page.wait_for(f"{IS_DONE} && {CAPTION}.includes('tok/s')")
    caption = page.evaluate(CAPTION)
    assert "first token after" in caption
    page.wait_for(f"{tokens} > {before}")  # the status is made anew once a second
    with tiny_server.http() as http:
        made = http.get("/v1/hal/status").json()["engine"]["generated_tokens"]
    page.wait_for(f"{tokens} === {made}")
    assert page.wait_for("/ms|µs/.test(document.getElementById('figures').innerText)")
    _is_clean(page, tiny_server)


def test_the_answer_of_a_chat_is_the_servers(browser: Browser, tiny_server: ServerProcess) -> None:
    page = _open(browser, tiny_server)
    page.evaluate("document.getElementById('chat-options').open = true")
    page.evaluate("document.getElementById('chat-temperature').value = 0")
    page.evaluate("document.getElementById('chat-max').value = 12")
    page.evaluate("document.getElementById('chat-system').value = 'Be brief.'")
    said = ["first question", "second question"]
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for text in said:
        _say(page, text)
        page.wait_for(f"{IS_DONE} && {CAPTION}.includes('tok')")
        messages.append({"role": "user", "content": text})
        answer = tiny_server.openai().chat.completions.create(
            model="tiny-chat",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=12,
            temperature=0,
        )
        wanted = answer.choices[0].message.content
        assert page.evaluate(LAST_TEXT) == wanted
        messages.append({"role": "assistant", "content": wanted or ""})
    _is_clean(page, tiny_server)


# ---- the chat ----


def test_stop_ends_the_generation(browser: Browser, server: Any) -> None:
    page = _open(browser, server)
    page.evaluate("document.getElementById('chat-max').value = 1500")
    _say(page, "!slow please")
    page.wait_for(f"{LAST_TEXT}.length > 3")
    assert page.evaluate("document.querySelector('.turn[aria-busy]') !== null")
    page.click("#chat-stop")
    page.wait_for(IS_DONE)
    assert "stopped by you" in page.evaluate(CAPTION)
    server.wait(lambda: not server.engine.live)
    _say(page, "!slow once more")
    page.wait_for(f"{LAST_TEXT}.length > 3 && document.querySelectorAll('.turn').length === 4")
    page.press("Escape")
    page.wait_for(IS_DONE)
    server.wait(lambda: not server.engine.live)
    page.click("#chat-clear")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    _is_clean(page, server)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!queue", "The queue is full"),
        ("!refuse", "the grammar does not compile"),
        ("!dead", "The engine has stopped"),
        ("!crash", "internal error"),
        ("!mid_error", "The logits were not finite."),
        ("!mid_crash", "internal error"),
        ("!template", "roles must alternate"),
    ],
)
def test_errors_in_words(browser: Browser, server: Any, text: str, words: str) -> None:
    page = _open(browser, server)
    _say(page, text)
    page.wait_for("document.querySelector('.turn .error')")
    assert words in page.evaluate("document.querySelector('.turn .error').textContent")
    assert page.evaluate("document.getElementById('chat-input').value") == text  # to try again
    assert page.evaluate(IS_DONE)
    page.evaluate("document.getElementById('chat-input').value = ''")
    _say(page, "hello")  # what failed is not sent along
    page.wait_for(f"{LAST_TEXT}.startsWith('Déjà vu')")
    prompt = bytes(i for i in server.engine.requests[-1].prompt_token_ids if i < 256).decode()
    assert prompt == "user: hello\n"
    assert [p for p in page.problems if "Failed to load resource" not in p] == []
    page.close()


def test_answers_are_text_and_never_markup(browser: Browser, server: Any) -> None:
    page = _open(browser, server)
    _say(page, HOSTILE)
    page.wait_for(f"{IS_DONE} && document.querySelectorAll('.turn').length === 2")
    assert page.evaluate("document.querySelector('.turn.user .text').textContent") == HOSTILE
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    _is_clean(page, server)


def test_wrong_options_are_pointed_at(browser: Browser, server: Any) -> None:
    page = _open(browser, server)
    before = len(server.engine.requests)
    for field, value in (("chat-temperature", "3"), ("chat-max", "0"), ("chat-max", "")):
        page.evaluate(f"document.getElementById('{field}').value = '{value}'")
        _say(page, "x")
        assert page.evaluate("document.activeElement.id") == field
        page.evaluate(f"document.getElementById('{field}').value = 1")
    assert len(server.engine.requests) == before
    _is_clean(page, server)


def test_a_model_without_a_chat_template_continues_text(
    browser: Browser, start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    monkeypatch.setattr(type(server.engine.tokenizer), "has_chat_template", False)
    page = _open(browser, server)
    assert "no chat template" in page.text()
    _say(page, "Once upon a time")
    page.wait_for(f"{LAST_TEXT}.startsWith('Déjà vu')")
    page.wait_for(IS_DONE)
    _is_clean(page, server)


# ---- the plan and the calls ----


def test_the_plan_with_losers_and_filters(browser: Browser, start_server: Any) -> None:
    server = start_server()
    lost = {"better": "cpu.gemm.amx", "better_tier": "native", "unlock": ["install amx"]}
    waived = _op(99, choice="reference.gemm", tier="reference", waiver="tier waiver", lost=lost)
    _plan(server.engine, *[_op(i) for i in range(80)], waived)
    page = _open(browser, server)
    assert "81 decisions: 80 native, 1 reference, 1 with a waiver" in page.text()
    assert "proj99" in page.evaluate("document.querySelector('.op').textContent")  # worst first
    assert page.evaluate("document.querySelectorAll('.op').length") == 60
    page.evaluate("document.querySelector('.op summary').focus()")
    page.press("Enter")
    page.wait_for("document.querySelector('.inside')")
    inside = page.evaluate("document.querySelector('.inside').innerText")
    for words in ("cpu.gemm.amx", "install amx", "tier waiver", "head_dim: required at most 64"):
        assert words in inside
    page.click(".more button")
    assert page.evaluate("document.querySelectorAll('.op').length") == 81
    assert "layers.0–2.proj" in page.evaluate("document.activeElement.textContent")
    page.evaluate("document.getElementById('plan-filter').focus()")
    page.type_text("PROJ7 native")
    page.wait_for("document.querySelectorAll('.op').length === 11")
    page.type_text(" nothing-like-it")
    page.wait_for("document.getElementById('plan').innerText.includes('No call site')")
    _is_clean(page, server)


def test_hostile_names_are_shown_as_text(browser: Browser, start_server: Any) -> None:
    server = start_server()
    engine = server.engine
    engine.model_id = HOSTILE
    engine.degraded = [f"tier waiver {HOSTILE}"]
    _plan(engine, _op(1, site=HOSTILE, choice=f"cpu.{HOSTILE}", layers=[]), name=HOSTILE)
    rows = [
        OpCallCount(
            site="a",
            op="gemm",
            phase="decode",
            implementation=f"cpu.{HOSTILE}",
            tier="native",
            token_range="1-8",
            calls=3,
        )
    ]
    engine.op_calls = lambda: rows
    page = _open(browser, server)
    escaped = HOSTILE.replace("\u202e", "\\u202e")
    for place in ("model", "devices", "calls", "plan", "notices"):
        text = page.evaluate(f"document.getElementById('{place}').textContent")
        assert escaped in text, place
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.title").startswith("<img")
    _say(page, "hello")  # the model's name goes back as it is
    page.wait_for(f"{LAST_TEXT}.startsWith('Déjà vu')")
    page.wait_for(IS_DONE)
    _is_clean(page, server)


# ---- states ----


def _state(page: Page, word: str) -> None:
    page.wait_for(f"document.getElementById('state-word').textContent === '{word}'")


def test_degraded_draining_stopped(browser: Browser, start_server: Any) -> None:
    server = start_server()
    page = _open(browser, server)
    _state(page, "ready")
    assert page.evaluate("document.getElementById('notices').innerText") == ""
    assert "no request yet" in page.text()
    server.engine.degraded = ["tier waiver for rope: slow is fine (owner the tests)"]
    _state(page, "degraded")
    assert "owner the tests" in page.evaluate("document.getElementById('notices').innerText")
    _say(page, "!endless")  # or the drain would be over at once
    page.wait_for(f"!({IS_DONE})")
    server.wait(lambda: server.state.active_requests == 1)
    server.state.is_draining = True
    _state(page, "draining")
    assert page.evaluate("document.getElementById('chat-send').disabled")
    server.engine.stats_error = EngineDeadError("gone")
    _state(page, "stopped")
    assert "has to be started again" in page.text()
    _is_clean(page, server)


def test_a_stalled_engine_is_said(browser: Browser, start_server: Any) -> None:
    """The page's own clock of steps; its samples are made up here, so that nobody waits."""
    server = start_server()
    server.engine.live = {"one"}  # runs, and no step ends
    page = _open(browser, server)
    server.state.started_s -= 3600  # an hour passes between two polls
    page.wait_for("document.getElementById('notice-stalled')")
    server.engine.live = set()
    page.wait_for("!document.getElementById('notice-stalled')")
    _is_clean(page, server)


def test_a_lost_server_comes_back(browser: Browser, serve: Any, fake: Any) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serve(fake.FakeEngine()))
        page = _open(browser, first)
        _say(page, "!slow and long")
        page.wait_for(f"{LAST_TEXT}.length > 2")
        port = first.port
    page.wait_for("document.getElementById('notice-lost')")
    _state(page, "no connection")
    assert page.evaluate("document.body.classList.contains('stale')")
    page.wait_for(IS_DONE)
    assert page.evaluate("document.querySelector('.turn .error').textContent")
    assert page.evaluate("document.getElementById('chat-send').disabled")
    page.wait_for("/again in \\d+ s/.test(document.getElementById('notice-lost').innerText)")
    assert accessibility_problems(page) == {}
    with serve(fake.FakeEngine(), port=port) as second:
        page.click("#notice-lost button")
        _state(page, "ready")
        page.wait_for("!document.getElementById('notice-lost')")
        assert not page.evaluate("document.body.classList.contains('stale')")
        _say(page, "hello again")
        page.wait_for(f"{LAST_TEXT}.startsWith('Déjà vu')")
        assert second.engine.requests
        network = ("ERR_", "Failed to load resource")
        assert [p for p in page.problems if not any(word in p for word in network)] == []
        page.close()


def test_back_off_grows(browser: Browser, serve: Any, fake: Any) -> None:
    with serve(fake.FakeEngine()) as running:
        page = _open(browser, running)
        # The page's timers, without its waiting.
        page.evaluate(
            "window.waits = []; const own = window.setTimeout; window.setTimeout = (f, ms, ...rest)"
            " => { if (ms >= 1000) window.waits.push(ms); return own(f, ms / 100, ...rest); }"
        )
    page.wait_for("window.waits.includes(30000)")
    waits = page.evaluate("window.waits.filter((ms, i, all) => ms !== 1000 || all[i + 1] === 2000)")
    assert waits[:6] == [1000, 2000, 4000, 8000, 15000, 30000]
    page.close()


def test_a_page_that_nobody_sees_asks_nothing(browser: Browser, server: Any) -> None:
    page = _open(browser, server)
    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.isHidden})")
    page.evaluate("window.isHidden = true")
    time.sleep(1.5)  # what was under way has come
    page.evaluate("1")
    before = len(page.requests)
    time.sleep(2.5)
    page.evaluate("1")
    assert len(page.requests) == before
    page.evaluate("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    end = time.monotonic() + 20
    while len(page.requests) == before:
        assert time.monotonic() < end
        page.evaluate("1")
    _is_clean(page, server)


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Browser, start_server: Any) -> None:
    server = start_server(api_key=KEY)
    page = browser.open_page(f"{server.url}/")
    page.wait_for("!document.getElementById('key').hidden")
    assert "fake/model" not in page.text()
    assert page.evaluate("document.activeElement.id") == "key-input"
    page.type_text("not-the-key")
    page.press("Enter")
    page.wait_for("document.getElementById('key-error').textContent.includes('not right')")
    assert page.evaluate("sessionStorage.length") == 0
    assert accessibility_problems(page) == {}
    page.type_text(KEY)
    page.press("Enter")
    page.wait_for(SHOWN)
    _say(page, "hello")
    page.wait_for(f"{LAST_TEXT}.startsWith('Déjà vu')")
    page.go(f"{server.url}/")  # a reload of the same tab
    page.wait_for(SHOWN)
    kept = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert json.loads(kept) == [{}, {"halstack.key": KEY}, ""]
    assert all(KEY not in url for url in page.requests)
    page.click("#forget-key")
    page.wait_for("document.getElementById('key')?.hidden === false && !sessionStorage.length")
    unauthorised = [p for p in page.problems if "401" not in p]
    assert unauthorised == []
    page.close()


# ---- for everybody ----


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (820, 1100), (360, 740)])
def test_every_reader(
    browser: Browser, start_server: Any, tmp_path: Path, width: int, height: int, is_dark: bool
) -> None:
    server = start_server(served_model_names=("another-name",))
    tiers = ("native", "tuned", "portable", "reference")
    ops = [_op(i, tier=tiers[i % 4], waiver="w" if i % 4 == 3 else None) for i in range(12)]
    _plan(server.engine, *ops, name="A processor with quite a long name @ 2.70GHz (64 cores)")
    server.engine.degraded = ["tier waiver for " + "a.very.long.name." * 8]
    page = _open(
        browser, server, width=width, height=height, is_dark=is_dark, is_mobile=width < 500
    )
    _say(page, "!slow hello")
    page.wait_for(f"{LAST_TEXT}.length > 3")
    page.click("#chat-stop")
    page.evaluate("document.querySelectorAll('.op')[0].open = true")
    page.evaluate("document.getElementById('chat-options').open = true")
    page.wait_for("document.querySelector('.inside')")
    assert accessibility_problems(page) == {}
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == is_dark
    assert page.screenshot(tmp_path / "page.png", full_page=True).stat().st_size > 10_000
    _is_clean(page, server)


def test_keyboard_reaches_everything(browser: Browser, start_server: Any) -> None:
    server = start_server()
    _plan(server.engine, _op(1))
    page = _open(browser, server)
    _say(page, "hello")
    page.wait_for(f"{IS_DONE} && {CAPTION}.includes('tok')")
    reached = focus_order(page)
    wanted = ["Skip to the content", "theme", "chat-clear", "chat-log", "chat-input"]
    wanted += ["plan-filter", "plan-tier", "grafana"]
    assert [name for name in reached if name in wanted] == wanted
    assert any("layers.0–2.proj1" in name for name in reached)
    _is_clean(page, server)


def test_the_theme_can_be_chosen_and_stays(browser: Browser, server: Any) -> None:
    page = _open(browser, server, is_dark=True)
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    assert page.evaluate(scheme) == "light dark"
    page.click("#theme")
    assert page.evaluate(scheme) == "light"
    page.go(f"{server.url}/")
    assert page.evaluate(scheme) == "light"
    page.wait_for("document.getElementById('theme').textContent === '◐ light'")
    page.click("#theme")
    assert page.evaluate(scheme) == "dark"
    _is_clean(page, server)


def test_paper_is_white_and_wide(browser: Browser, server: Any) -> None:
    """Whatever the theme; without the chat, whose column the others take."""
    page = _open(browser, server, is_dark=True)
    page.emulate_media(is_dark=True, medium="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    width = page.evaluate("document.querySelector('main').clientWidth")
    side = page.evaluate("document.querySelector('.side').getBoundingClientRect().width")
    assert side > 0.9 * width
    assert not page.evaluate("document.querySelector('.chat').checkVisibility()")
    _is_clean(page, server)
