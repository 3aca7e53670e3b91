"""The picture of the ladder: the score of each record's twin against the record's public score.

It is drawn from the committed rows of `studies/ladder`, by `bench/pictures.py`. A hollow dot is a random seed, a full
one the mean.
"""

from pathlib import Path
from statistics import fmean

from svg import picture, words

from caddie.lab.rows import RESULTS, STUDY, read_rows, read_study
from caddie.report.charts import nice_ticks

FOLDER = Path(__file__).resolve().parent.parent / "studies" / "ladder"
WIDTH, HEIGHT = 920, 620
LEFT, RIGHT, TOP, BOTTOM = 70, 890, 46, 570
"""Ends of the axes."""
LABEL_GAP = 13.0
"""Least height between two labels of one side."""
STYLE = """
.title { font-size: 15px; font-weight: 600 }
.grid { fill: none; stroke: #8b97a8; stroke-opacity: .25 }
.mean { fill: #2f6fde }
.broken { fill: #d9730d }
.seed { fill: none; stroke: #8b97a8 }
"""


def draw_ladder() -> str:
    """Draw the rungs that have a public score."""
    study = read_study(FOLDER / STUDY)
    public = {one["label"]: one["public_score"] for one in study["entries"]} | {
        "base": study["public"][0]["bits_per_byte"]
    }
    ours: dict[str, list[float]] = {}
    for row in read_rows(FOLDER / RESULTS):
        if public[row["label"]] is not None:
            ours.setdefault(row["label"], []).append(row["bits_per_byte"])
    across_ticks = nice_ticks(min(public[label] for label in ours), max(public[label] for label in ours), 6)
    up_ticks = nice_ticks(min(map(min, ours.values())), max(map(max, ours.values())), 6)

    def across(score: float) -> float:
        return LEFT + (RIGHT - LEFT) * (score - across_ticks[0]) / (across_ticks[-1] - across_ticks[0])

    def up(score: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (score - up_ticks[0]) / (up_ticks[-1] - up_ticks[0])

    parts = [words(LEFT - 50, 24, "Bits per byte of each twin, by the record's public score", "title", "start")]
    for tick in up_ticks:
        parts.append(f'<path class="grid" d="M{LEFT},{up(tick):.1f}H{RIGHT}"/>')
        parts.append(words(LEFT - 8, up(tick) + 4, f"{tick:.10g}", "place", "end"))
    for tick in across_ticks:
        parts.append(f'<path class="grid" d="M{across(tick):.1f},{TOP}V{BOTTOM}"/>')
        parts.append(words(across(tick), BOTTOM + 18, f"{tick:.10g}", "place"))
    parts.append(words((LEFT + RIGHT) / 2, HEIGHT - 10, "public score", "place"))
    below = {"start": -LABEL_GAP, "end": -LABEL_GAP}
    for label in sorted(ours, key=lambda label: -fmean(ours[label])):
        x, mean = across(public[label]), fmean(ours[label])
        earlier = [other for other in ours if public[other] > public[label]]
        broken = any(fmean(ours[other]) < mean for other in earlier)
        parts += [f'<circle class="seed" cx="{x:.1f}" cy="{up(score):.1f}" r="3"/>' for score in ours[label]]
        parts.append(f'<circle class="{"broken" if broken else "mean"}" cx="{x:.1f}" cy="{up(mean):.1f}" r="4.5"/>')
        side = "end" if broken else "start"
        below[side] = max(below[side] + LABEL_GAP, up(mean))
        name = study["base"].removesuffix("_scale32") if label == "base" else label
        parts.append(words(x - 12 if broken else x + 12, below[side] + 4, name, "", side))
    parts.append(words(LEFT + 8, TOP + 18, "orange: worse than an earlier rung", "place", "start"))
    return picture(WIDTH, HEIGHT, "Scores of twins by the public scores of their records", parts, STYLE)
