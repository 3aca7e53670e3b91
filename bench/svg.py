"""SVG as the pictures of the documentation are written: one style, for light and dark pages."""

from collections.abc import Iterable
from html import escape

STYLE = """
text { font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #374151 }
.name { font: 600 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #111827 }
.file { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #111827 }
.place { fill: #6b7280 }
.screen { fill: #161b22 }
.shell { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9 }
.shell.strong { fill: #ffffff; font-weight: 600 }
.box { fill: #f6f8fa; stroke: #c3cad4; stroke-width: 1.2 }
.line { fill: #e7f0fd; stroke: #6ea0e8 }
.made { fill: #eaf6ec; stroke: #7cc08a }
.arrow { fill: none; stroke: #8b97a8; stroke-width: 1.5 }
.head { fill: #8b97a8 }
@media (prefers-color-scheme: dark) {
 text { fill: #c4ccd6 }
 .shell { fill: #c9d1d9 }
 .name, .file { fill: #f3f6fa }
 .place { fill: #97a1ae }
 .box { fill: #20262e; stroke: #4b5563 }
 .line { fill: #1b2c45; stroke: #4b7fcb }
 .made { fill: #1a3222; stroke: #4c9a60 }
}
"""


def picture(width: float, height: float, title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole SVG file; `style` is added to the common one."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n"
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="head" d="M0,0L8,4L0,8z"/></marker></defs>\n{body}\n</svg>\n'
    )


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    """One line of text; `y` is its base line."""
    of = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{of}>{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rounded rectangle with its upper left corner at (x, y)."""
    return f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="7"/>'
