"""ComfyUI's editor by what a user sees and does there.

What the editor draws on its canvas has no element of its own: nodes and their fields are reached by its
scripting object `app`, everything else by element.
"""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, TimeoutError

PACK = "sixbit"  # the folder in custom_nodes


class Editor:
    """One page of the editor, opened."""

    def __init__(self, page: Page, url: str, shots: Path) -> None:
        self.page, self.shots = page, shots
        page.goto(url)
        self.queue = page.get_by_test_id("queue-button")
        self.queue.wait_for()
        page.wait_for_function("window.app?.canvas?.canvas && app.graph && app.extensionManager")
        page.wait_for_timeout(2000)  # it loads the last graph, for which there is no sign

    def shot(self, name: str) -> None:
        """Keep a picture of the page."""
        self.page.wait_for_timeout(1000)  # the canvas draws when it finds time
        self.page.screenshot(path=self.shots / f"{name}.png")

    def browse_templates(self) -> list[str]:
        """Open the template browser at this pack; returns the names shown."""
        self.page.get_by_role("button", name="Templates").first.click()
        self.page.get_by_text(PACK, exact=True).click()
        cards = self.page.locator('[data-testid^="template-workflow-"]')  # not template-workflows-content
        cards.first.wait_for()
        ids = cards.evaluate_all("cards => cards.map(card => card.dataset.testid)")
        return sorted(name.removeprefix("template-workflow-") for name in ids)

    def open_template(self, name: str) -> None:
        self.browse_templates()
        self.page.evaluate("window.before = app.graph.nodes[0]")
        self.page.get_by_test_id(f"template-workflow-{name}").click()
        self.page.wait_for_function("app.graph.nodes.length && app.graph.nodes[0] !== before")
        self.page.get_by_test_id("template-workflows-content").wait_for(state="hidden")

    def clear(self) -> None:
        """Open an empty graph."""
        self.page.evaluate("app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
        self.page.wait_for_function("app.graph.nodes.length === 0")

    def search(self, words: str) -> Locator:
        """Look for a node; returns the dialog that lists what was found."""
        self.clear()
        dialog = self.page.get_by_role("dialog")
        for last in (False, False, True):  # one that opens while another fades away may go with it
            dialog.first.wait_for(state="hidden")
            self.page.mouse.dblclick(700, 500)
            try:
                dialog.locator("input").first.fill(words, timeout=60_000 if last else 5_000)
                return dialog
            except TimeoutError:
                if last:
                    raise
                self.page.keyboard.press("Escape")

    def types(self) -> list[str]:
        """Types of the nodes on the canvas."""
        return sorted(self.page.evaluate("app.graph.nodes.map(node => node.type)"))

    def add(self, kind: str) -> None:
        """Put one node on an empty canvas and select it."""
        self.clear()
        self.page.evaluate(
            """kind => {
                const node = LiteGraph.createNode(kind);
                node.pos = [200, 200];
                app.graph.add(node);
                app.canvas.ds.reset();
                app.canvas.selectNode(node);
            }""",
            kind,
        )

    def set_field(self, kind: str, name: str, value: Any) -> None:
        """Set a field of the only node of a kind."""
        self.page.evaluate(
            """([kind, name, value]) => {
                const node = app.graph.nodes.find(node => node.type === kind);
                const field = node.widgets.find(field => field.name === name);
                field.value = value;
                field.callback?.(value);
            }""",
            [kind, name, value],
        )

    def text_field(self, shown: str) -> Locator:
        """The field of several lines that shows a text."""
        fields = self.page.get_by_test_id("dom-widget-textarea")
        fields.first.wait_for()
        return next(field for field in fields.all() if field.input_value() == shown)

    def change_setting(self, name: str, value: Any) -> None:
        self.page.evaluate(f"app.extensionManager.setting.set({json.dumps(name)}, {json.dumps(value)})")

    def errors(self) -> dict[str, str]:
        """What the editor says is wrong, by "node - field", with the sentence behind each."""
        self.page.get_by_test_id("error-overlay-see-errors").click()
        panel = self.page.get_by_test_id("properties-panel")
        asks = panel.get_by_role("button", name="Info for ")
        asks.first.wait_for()
        names = [ask.get_attribute("aria-label").removeprefix("Info for ") for ask in asks.all()]
        for ask in asks.all():
            ask.click()
        said = [line for line in panel.inner_text().splitlines() if "failed custom validation" in line]
        return dict(zip(names, said, strict=True))
