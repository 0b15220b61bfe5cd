"""The page in a headless Chromium, over a service in a process of its own: what it shows is what the service says.

`KVTIER_SCREENSHOTS=DIR` keeps what it looks like.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon_world import Daemon, Nursery, nursery
from patience import PATIENCE, came_true, until
from playwright import sync_api
from programs import program
from rest_world import KEYS, block, chain, match, put_stream, stream

from kvtier.service.cache import Scope, Tokens

CHROMIUM = program("chromium", "apt-get install chromium")

DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
NBYTES = 4096


class Service(Daemon):
    """On the same port again after it was killed, with a little NVMe below host."""

    def start(self) -> None:
        disk = {"path": str(self.socket.parent / "nvme"), "capacity": "8MiB", "segment_size": "2MiB", "min_free": 0}
        self._config["tiering"]["nvme"] = disk
        super().start()
        self._config["service"]["port"] = int(self.url.rpartition(":")[2])

    def client(self, secret: str | None = None) -> httpx.Client:
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20, verify=False)


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def service(forks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With two namespaces, hits, misses, evictions and refusals."""
    served = Service(forks, tmp_path_factory.mktemp("service"), host="256KiB")
    try:
        with served.client() as http:
            for name, blocks in (("llama-3.1-8b", 24), ("smollm2", 4)):
                http.post("/v1/namespaces", json={"name": name, "layout": None}).raise_for_status()
                put_stream(http, name, stream(chain(blocks, nbytes=NBYTES))).raise_for_status()
                match(http, name, keys=KEYS[:6]).raise_for_status()
                http.post(f"/v1/namespaces/{name}/blocks:get", json={"keys": KEYS[:8]}).raise_for_status()
            others = [f"{at:032x}" for at in range(1, 49)]
            put_stream(http, "smollm2", stream(chain(48, nbytes=NBYTES, keys=others))).raise_for_status()
            assert http.get("/v1/namespaces/nothing").status_code == 404
        yield served
    finally:
        served.kill()


@contextmanager
def opened(browser: Any, url: str, *, failing: bool = False, **options: Any) -> Iterator[Any]:
    """A page that throws nothing, says nothing on its console and asks nobody else.

    failing: whether some of its requests fail or are refused, which the browser itself says on the console.
    """
    context = browser.new_context(**{**DESKTOP, **options})
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(f"thrown: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert [text for text in said if not (failing and text.startswith("Failed to load resource"))] == []
    assert {one for one in asked if not one.startswith(f"{url}/")} == set()


def values(page: Any, selector: str) -> list[float]:
    found: list[float] = page.eval_on_selector_all(f"{selector} data", "nodes => nodes.map((one) => Number(one.value))")
    return found


def rows(page: Any, part: str) -> dict[str, list[float]]:
    """Figures by the row's first cell."""
    heads = [text.strip() for text in page.locator(f"#{part} tbody th").all_text_contents()]
    return {head: values(page, f"#{part} tbody tr:nth-child({at})") for at, head in enumerate(heads, 1)}


def refresh(page: Any) -> None:
    """Ask now, as when the tab comes to the front."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def ready(page: Any) -> None:
    page.locator("#status", has_text=re.compile("^Ready$")).wait_for()


def shows(get: Callable[[], object], wanted: object) -> None:
    """At the latest soon."""
    came_true(lambda: get() == wanted)
    assert get() == wanted


def lost_rows(page: Any) -> set[tuple[str, ...]]:
    script = "rows => rows.map((row) => [...row.cells].slice(0, 3).map((cell) => cell.textContent))"
    heads = page.eval_on_selector_all("#losses tbody tr", script)
    return {(*head, value) for head, value in zip(heads, values(page, "#losses tbody"), strict=True)}


def ratio(part: int, rest: int) -> float:
    return pytest.approx(part / (part + rest), abs=1e-9)


def test_the_figures_are_those_of_the_service(browser, service):
    with opened(browser, service.url) as page, service.client() as http:
        ready(page)
        # Nothing moves any more once NVMe has what was put.
        until(lambda: http.get("/v1/stats").json()["tenants"][0]["tiers"]["store"]["waiting_bytes"] == 0)
        refresh(page)
        stats = http.get("/v1/stats").json()
        (tenant,) = stats["tenants"]
        for name, read in (("host", tenant["out_bytes"]), ("nvme", tenant["flows"]["nvme"]["read_bytes"])):
            tier, flow = tenant["tiers"][name], tenant["flows"][name]
            lost = [sum(flow[kind].values()) for kind in ("evicted", "dropped")]
            share = pytest.approx(tier["bytes"] / tier["capacity_bytes"])
            occupied = [share, tier["bytes"], tier["capacity_bytes"]]
            wanted = [*occupied, tier["blocks"], read, flow["written_bytes"], *lost, flow["corrupt"]]
            shows(lambda name=name: values(page, f"[data-tier={name}]"), wanted)
        assert rows(page, "spaces") == {
            space["name"]: [
                space["host_bytes"],
                space["host_blocks"],
                space["stored_bytes"],
                ratio(space["hits"], space["misses"]),
                ratio(space["matched"], space["unmatched"]),
            ]
            for space in tenant["namespaces"]
        }
        assert {space["name"] for space in tenant["namespaces"]} == {"llama-3.1-8b", "smollm2"}
        assert lost_rows(page) == {
            (reason.replace("_", " "), name, kind, float(blocks))
            for name, flow in tenant["flows"].items()
            for kind in ("evicted", "dropped")
            for reason, blocks in flow[kind].items()
        }
        assert ("capacity", "host", "evicted", 12.0) in lost_rows(page)
        moving = {"stats", "history"}
        told = {
            verb["verb"]: [verb["outcomes"].get("ok", 0), *others(verb["outcomes"]), verb["p50"], verb["p99"]]
            for verb in stats["verbs"]
        }
        shown = rows(page, "verbs")
        assert {name: row for name, row in shown.items() if name not in moving} == {
            name: row for name, row in told.items() if name not in moving
        }
        assert moving < set(shown)
        assert page.locator("#verbs tr", has_text="unknown namespace").count() == 1
        total = tenant["traffic"]
        tiles = dict(zip(page.locator(".tile dt").all_text_contents(), values(page, ".tile"), strict=False))
        assert tiles["Read hits"] == ratio(total["hits"], total["misses"])
        assert page.locator("[data-tier=host] p.quiet").inner_text() == "256 KiB of 256 KiB"


def others(outcomes: dict[str, int]) -> list[int]:
    return [count for outcome, count in outcomes.items() if outcome != "ok"]


def test_every_figure_has_a_unit_and_reads_well(browser, service):
    cases = {
        "bytes": {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1047552: "1023 KiB", 1048063: "1023 KiB"},
        "byteRate": {3 << 40: "3 TiB/s"},
        "count": {1234567: "1,234,567"},
        "rate": {0: "0/s", 0.25: "0.25/s", 12345.6: "12,346/s"},
        "percent": {0: "0 %", 1: "100 %", 0.99999: "99.9 %", 0.00001: "< 0.1 %", 0.4567: "45.7 %"},
        "seconds": {0.00002: "20 µs", 0.0005: "500 µs", 0.02: "20 ms", 30: "30 s"},
        "duration": {0.4: "0 s", 59: "59 s", 61: "1 min 1 s", 7200: "2 h", 90000: "1 d 1 h"},
    }
    with opened(browser, service.url) as page:
        for name, wanted in cases.items():
            script = f"async (value) => (await import('/dashboard/format.js')).{name}(value)"
            assert [page.evaluate(script, one) for one in wanted] == list(wanted.values())


def history() -> dict[str, Any]:
    """Three minutes by 5 seconds: reads hit always but in the third minute, where half of them do."""
    times = [1790000000 + 5 * at for at in range(37)]
    hits = [10 * min(at, 24) + 5 * max(at - 24, 0) for at in range(37)]
    moved = [1024 * at for at in hits]
    tier = {"bytes": [1 << 20] * 37, "capacity_bytes": [4 << 20] * 37, "evicted": [0] * 37, "dropped": [0] * 37}
    return {
        "times": times,
        "hits": hits,
        "misses": [10 * at - hit for at, hit in enumerate(hits)],
        "matched": [0] * 37,
        "unmatched": [0] * 37,
        "in_bytes": [0] * 37,
        "out_bytes": moved,
        "tiers": {"host": tier | {"read_bytes": moved, "written_bytes": moved}},
    }


def test_curves_are_the_history(browser, service):
    with opened(browser, service.url) as page:
        page.route("**/v1/stats/history*", lambda route: route.fulfill(json=history()))
        refresh(page)
        hits, callers, full = (page.locator("#curves figure").nth(at) for at in range(3))
        hits.locator("data[value='0.5']").wait_for()
        assert hits.locator("dd").all_text_contents() == ["50 %", "\N{EN DASH}"]
        assert callers.locator("dd").all_text_contents() == ["0 B/s", "1 KiB/s"]
        assert full.locator("dd").all_text_contents() == ["25 %"]
        points = hits.locator("polyline").get_attribute("points").split()
        heights = [float(point.split(",")[1]) for point in points]
        assert len(points) == 36
        assert heights == sorted(heights)
        assert len(set(heights)) == 2
        plot = hits.locator(".plot")
        plot.focus()
        page.keyboard.press("Home")
        assert hits.locator("dd").first.inner_text() == "100 %"
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        assert "reads 50 %" in plot.get_attribute("aria-label")
        plot.hover(position={"x": 100, "y": 50})
        assert hits.locator("dd").first.inner_text() == "100 %"
        hits.locator("summary").click()
        hits.locator("tbody td").first.wait_for()
        cells = hits.locator("tbody td:nth-child(2)").all_text_contents()
        assert cells == ["50 %"] * 4 + ["100 %"] * 8


def test_the_curves_outlive_a_reload(browser, service):
    with opened(browser, service.url) as page:
        ready(page)
        page.reload()
        ready(page)
        told = page.locator("#curves figure").first.locator(".curve").count()
        assert told >= 3, "two in the legend, and what happened before the page was opened"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits(browser, service, scheme, size, request):
    with opened(browser, service.url, color_scheme=scheme, reduced_motion="reduce", **size) as page:
        ready(page)
        page.locator("#spaces data").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == size["viewport"]["width"]
        light, ink = page.evaluate(
            "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.body).color]"
            ".map((color) => color.match(/\\d+/g).reduce((sum, part) => sum + Number(part), 0))"
        )
        assert (light > 600, ink < 200) == (scheme == "light",) * 2
        assert page.evaluate("getComputedStyle(document.getElementById('figures')).transitionDuration") == "0s"
        folder = os.environ.get("KVTIER_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder) / f"{request.node.callspec.id}.png", full_page=True)


def test_it_is_walked_by_keys(browser, service):
    with opened(browser, service.url) as page:
        ready(page)
        walked = []
        for _ in range(40):
            page.keyboard.press("Tab")
            place = page.evaluate(
                "(() => { const one = document.activeElement; const shown = getComputedStyle("
                "one.type === 'radio' ? one.nextSibling : one); return [one.id || one.getAttribute('class') || one.name"
                " || one.tagName, shown.outlineStyle, one.getBoundingClientRect().top]; })()"
            )
            if place[0] == "BODY":
                break
            walked.append(place)
        names = [name for name, _, _ in walked]
        assert {style for name, style, _ in walked} == {"solid"}
        wanted = ["skip", "range", "plot", "scroller", "events-pause"]
        assert [names.index(name) for name in wanted] == sorted(names.index(name) for name in wanted)
        assert names.count("plot") == 5
        pause = page.locator("#events-pause")
        pause.focus()
        page.keyboard.press("Space")
        assert (pause.get_attribute("aria-pressed"), pause.inner_text()) == ("true", "Go on")
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.locator("#range input").first.focus()
        with page.expect_request(re.compile(r"history\?seconds=3600")):
            page.keyboard.press("ArrowRight")
        assert page.locator("main, header, footer").count() == 3
        assert page.locator("section:not([aria-labelledby])").count() == 0


def test_names_and_reasons_are_text(browser, service):
    with opened(browser, service.url) as page:
        data = {"time": 1, "tier": "host", "namespace": HOSTILE, "keys": ["ab" * 16], "reason": HOSTILE}
        message = f"id: 0-1\nevent: removed\ndata: {json.dumps(data)}\n\n"
        page.route("**/v1/events", lambda route: route.fulfill(content_type="text/event-stream", body=message))

        def bend(route: Any) -> None:
            stats = route.fetch().json()
            (tenant,) = stats["tenants"]
            tenant["namespaces"][0]["name"] = HOSTILE
            tenant["flows"]["host"]["evicted"] = {HOSTILE: 7}
            stats["verbs"][0]["outcomes"] = {HOSTILE: 1}
            stats["verbs"][0]["verb"] = HOSTILE
            stats["tenants"] = [tenant | {"name": HOSTILE}, tenant]
            route.fulfill(json=stats)

        page.route("**/v1/stats", bend)
        page.reload()
        for part in ("spaces", "losses", "verbs", "events", "tenants"):
            page.locator(f"#{part} tbody tr", has_text="<img src=x onerror=").first.wait_for()
        assert page.locator("#tenant option", has_text="<img").count() == 1
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.hacked") is None
        assert service.client().post("/v1/namespaces", json={"name": HOSTILE}).status_code == 400


def test_events_come_as_they_happen(browser, service):
    with opened(browser, service.url) as page, service.client() as http:
        # A page that is left gets no answer any more: the one that is waited for is the next page's.
        page.goto("about:blank")
        with page.expect_response("**/v1/events"):
            page.goto(service.url)
        key = "e1" * 16
        http.put(f"/v1/namespaces/smollm2/blocks/{key}", content=block(1, NBYTES)).raise_for_status()
        row = page.locator("#events tbody tr", has_text="stored").filter(has_text=key[:12]).filter(has_text="host")
        row.wait_for()
        page.locator("#events-pause").click()
        http.delete(f"/v1/namespaces/smollm2/blocks/{key}").raise_for_status()
        gone = page.locator("#events tbody tr", has_text="removed").filter(has_text=key[:12])
        page.wait_for_timeout(600)
        assert gone.count() == 0
        page.locator("#events-pause").click()
        gone.first.wait_for()


def test_it_lives_through_a_restart_and_begins_with_what_to_do(browser, forks, tmp_path):
    service = Service(forks, tmp_path)
    try:
        with opened(browser, service.url, failing=True) as page:
            ready(page)
            page.locator("#first").wait_for()
            lines = page.locator("#first-lines").inner_text()
            assert f'curl {service.url}/v1/namespaces --json \'{{"name": "demo"}}\'' in lines
            program("curl", "apt-get install curl")
            done = subprocess.run(["bash", "-ec", lines], cwd=tmp_path, check=True, capture_output=True, text=True)
            assert '{"outcome":"stored"}' in done.stdout
            assert '{"blocks":1,"tiers":["host"],"keys":null}' in done.stdout
            assert (tmp_path / "got").read_bytes() == (tmp_path / "block").read_bytes()
            with service.client() as http:
                http.post("/v1/namespaces/demo:clear").raise_for_status()
                put_stream(http, "demo", stream(chain(2, nbytes=NBYTES))).raise_for_status()
            refresh(page)
            page.locator("#first").wait_for(state="hidden")
            assert rows(page, "spaces")["demo"][:2] == [2 * NBYTES, 2]
            service.kill()
            refresh(page)
            page.locator("#status", has_text=re.compile(r"^Unreachable since \d\d:\d\d:\d\d, trying again$")).wait_for()
            assert rows(page, "spaces")["demo"][:2] == [2 * NBYTES, 2]
            assert page.locator("figure .now:visible").count() == 0, "what is shown is not of now"
            service.start()
            refresh(page)
            ready(page)
            page.locator("#spaces data[value='0']").first.wait_for()
            with service.client() as http:
                put_stream(http, "demo", stream(chain(3, nbytes=NBYTES, keys=KEYS[4:]))).raise_for_status()
            page.locator("#events tbody tr", has_text="demo").filter(has_text=KEYS[4][:12]).first.wait_for()
            refresh(page)
            page.locator(f"#spaces data[value='{3 * NBYTES}']").first.wait_for()
    finally:
        service.kill()


def test_tokens_open_what_is_theirs(browser, forks, tmp_path):
    table, path = tmp_path / "tenants.toml", tmp_path / "tokens.json"
    table.write_text('[a]\nhost = "1MiB"\nnvme = "2MiB"\n\n[b]\nhost = "1MiB"\nnvme = "2MiB"\n')
    tokens = Tokens.open(path)
    secrets = {name: tokens.create(name, {Scope.READ, Scope.WRITE}) for name in ("a", "b")}
    admin = tokens.create("a", Scope)
    service = Service(forks, tmp_path / "service", tokens=str(path), tenants=str(table))
    try:
        for name, secret in secrets.items():
            with service.client(secret) as http:
                http.post("/v1/namespaces", json={"name": f"of-{name}"}).raise_for_status()
                put_stream(http, f"of-{name}", stream(chain(2, nbytes=NBYTES))).raise_for_status()
        with opened(browser, service.url, failing=True) as page, service.client(secrets["a"]) as http:
            page.locator("#status", has_text="Token needed").wait_for()
            assert page.evaluate("document.activeElement.id") == "token"
            assert page.locator("#range").is_hidden()
            enter(page, "wrong")
            page.locator("#entry-error", has_text="This token opens nothing here").wait_for()
            assert page.locator("#figures").is_hidden()
            with page.expect_response("**/v1/events"):
                enter(page, secrets["a"])
            ready(page)
            assert list(rows(page, "spaces")) == ["of-a"]
            assert page.locator("#tenants-part").is_hidden()
            assert "scope admin" in page.locator("#verbs").inner_text()
            put_stream(http, "of-a", stream(chain(1, keys=KEYS[9:]))).raise_for_status()
            page.locator("#events tbody tr", has_text=KEYS[9][:12]).first.wait_for()
            kept = page.evaluate("[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]")
            assert kept == [[secrets["a"]], [], ""]
            page.locator("#forget").click()
            page.locator("#status", has_text="Token needed").wait_for()
            assert page.evaluate("sessionStorage.length") == 0
            enter(page, admin)
            ready(page)
            assert set(rows(page, "spaces")) == {"of-a", "of-b"}
            assert set(rows(page, "tenants")) == {"a", "b"}
            page.set_viewport_size(PHONE["viewport"])
            assert page.locator("#spaces td.whose:visible").all_text_contents() == ["a", "b"]
            page.locator("#tenant").select_option("b")
            page.locator("#spaces tbody tr", has_text="of-a").wait_for(state="detached")
            assert set(rows(page, "spaces")) == {"of-b"}
            assert page.locator("#spaces td.whose:visible").count() == 0
    finally:
        service.kill()


def enter(page: Any, secret: str) -> None:
    page.locator("#token").fill(secret)
    page.keyboard.press("Enter")
