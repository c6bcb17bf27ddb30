"""Pictures of pictures: a row of one time, a strip of all times, before over after. No torch."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from trainer.files import atomic

_CELL_MINIMUM, _CELL_MAXIMUM = 192, 384
_MARGIN = 8
_TEXT_LINES = 2
_STRIP_WIDTH, _STRIP_HEIGHT = 2048, 16384

_PAGE_WIDTH, _PAGE_COLUMNS = 1700, 8
_PAGE_MARGIN, _PAGE_GAP, _ROW_GAP, _BLOCK_GAP = 20, 12, 16, 28
_CAPTION_LINES = 4
_CARD_PIXELS, _CARD_TEXT_SIZE, _CARD_LINES = 512, 24, 15
_TITLE_COLOUR, _CAPTION_COLOUR, _FRAME_COLOUR = "#1f2328", "#59636e", "#d1d9e0"
_ROW_NAME = re.compile(r"step-(\d{6,})(?:\.png)?")
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def row(images: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """Pictures side by side under a title, each with its caption below; small pictures are enlarged to be
    seen.
    """
    images = _same_size(images)
    enlarge = max(1, -(-_CELL_MINIMUM // images[0].width))
    width, height = images[0].width * enlarge, images[0].height * enlarge
    font_size = max(12, width // 22)
    font = ImageFont.load_default(size=font_size)
    line = font_size + 4
    total_width = (width + _MARGIN) * len(images) + _MARGIN
    picture = Image.new("RGB", (total_width, line + height + line * _TEXT_LINES + 3 * _MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((_MARGIN, _MARGIN // 2), title, fill="black", font=font)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = _MARGIN + number * (width + _MARGIN)
        picture.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, line + _MARGIN))
        wrapped = textwrap.wrap(caption, width=max(8, int(width / (font_size * 0.5))), max_lines=_TEXT_LINES)
        draw.multiline_text((left, line + height + 2 * _MARGIN), "\n".join(wrapped), fill="black", font=font)
    return picture


def shown(drawn: Image.Image | str) -> Image.Image:
    """A picture as it is; a text as a card to read."""
    if isinstance(drawn, Image.Image):
        return drawn
    font = ImageFont.load_default(size=_CARD_TEXT_SIZE)
    lines = []
    for paragraph in drawn.splitlines() or [""]:
        lines += _wrapped(paragraph, font, _CARD_PIXELS - 2 * _PAGE_MARGIN, most=_CARD_LINES) or [""]
    card = Image.new("RGB", (_CARD_PIXELS, _CARD_PIXELS), "white")
    text = "\n".join(lines[:_CARD_LINES])
    ImageDraw.Draw(card).multiline_text((_PAGE_MARGIN, _PAGE_MARGIN), text, fill=_TITLE_COLOUR, font=font)
    return card


def _same_size(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Pictures on white sheets of one size, where they differ."""
    width, height = (max(image.size[axis] for image in images) for axis in (0, 1))
    sheets = []
    for image in images:
        sheet = Image.new("RGB", (width, height), "white")
        sheet.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
        sheets.append(sheet if image.size != (width, height) else image)
    return sheets


@dataclass(frozen=True, kw_only=True)
class _Page:
    """Measures of a before-and-after picture, in pixels."""

    cell_width: int
    cell_height: int
    columns: int
    """In every block but perhaps the last."""
    title_size: int
    caption_size: int

    @property
    def title_line(self) -> int:
        return round(self.title_size * 1.6)

    @property
    def caption_line(self) -> int:
        return round(self.caption_size * 1.3)

    def left(self, column: int) -> int:
        """Of the pictures in a column."""
        return _PAGE_MARGIN + column * (self.cell_width + _PAGE_GAP)

    def block_height(self, caption_lines: int) -> int:
        """Two titled rows and the captions below."""
        return 2 * (self.title_line + self.cell_height + _ROW_GAP) + caption_lines * self.caption_line


def _page(width: int, height: int, count: int) -> _Page:
    """Small pictures are enlarged by a whole number, large ones made smaller; blocks are equally full."""
    longest = max(width, height)
    scale = max(1, -(-_CELL_MINIMUM // longest)) if longest <= _CELL_MAXIMUM else _CELL_MAXIMUM / longest
    cell_width, cell_height = max(1, round(width * scale)), max(1, round(height * scale))
    fitting = (_PAGE_WIDTH - 2 * _PAGE_MARGIN + _PAGE_GAP) // (cell_width + _PAGE_GAP)
    blocks = -(-count // min(_PAGE_COLUMNS, fitting))
    caption_size = max(15, round(max(cell_width, cell_height) / 16))
    return _Page(
        cell_width=cell_width,
        cell_height=cell_height,
        columns=-(-count // blocks),
        title_size=round(caption_size * 1.2),
        caption_size=caption_size,
    )


def before_after(
    rows: Sequence[Sequence[Image.Image]], captions: Sequence[str], titles: Sequence[str]
) -> Image.Image:
    """Two rows of pictures of the same captions, one over the other, each under its title.

    rows: before and after. More columns than fit become further blocks below.
    """
    both = _same_size([image for images in rows for image in images])
    before, after = both[: len(captions)], both[len(captions) :]
    page = _page(before[0].width, before[0].height, len(captions))
    title_font = ImageFont.load_default(size=page.title_size)
    caption_font = ImageFont.load_default(size=page.caption_size)
    texts = [_wrapped(caption, caption_font, page.cell_width) for caption in captions]
    starts = range(0, len(captions), page.columns)
    heights = [page.block_height(max(map(len, texts[start : start + page.columns]))) for start in starts]
    width = max(
        page.left(page.columns) - _PAGE_GAP, *(_PAGE_MARGIN + round(title_font.getlength(t)) for t in titles)
    )
    size = (width + _PAGE_MARGIN, 2 * _PAGE_MARGIN + sum(heights) + _BLOCK_GAP * (len(starts) - 1))
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    top = _PAGE_MARGIN
    for start, height in zip(starts, heights, strict=True):
        y = top
        for title, images in zip(titles, (before, after), strict=True):
            draw.text((_PAGE_MARGIN, y), title, fill=_TITLE_COLOUR, font=title_font)
            y += page.title_line
            for column, image in enumerate(images[start : start + page.columns]):
                left, right = page.left(column), page.left(column) + page.cell_width
                # around the picture, not on it: one on white ends somewhere
                frame = (left - 1, y - 1, right, y + page.cell_height)
                draw.rectangle(frame, outline=_FRAME_COLOUR)
                cell = image.resize((page.cell_width, page.cell_height), Image.Resampling.LANCZOS)
                picture.paste(cell, (left, y))
            y += page.cell_height + _ROW_GAP
        for column, lines in enumerate(texts[start : start + page.columns]):
            for number, text in enumerate(lines):
                place = (page.left(column), y + number * page.caption_line)
                draw.text(place, text, fill=_CAPTION_COLOUR, font=caption_font)
        top += height + _BLOCK_GAP
    return picture


def _wrapped(text: str, font: _Font, width: int, *, most: int = _CAPTION_LINES) -> list[str]:
    """At most `most` lines that fit; a word that is too long is cut, a text that is too long ends in dots."""
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
            continue
        rest = word
        while rest:
            lines.append(_head(rest, font, width))
            rest = rest[len(lines[-1]) :]
    if len(lines) > most:
        dots = "..."
        last = _head(lines[most - 1], font, width - round(font.getlength(dots)))
        lines[most - 1 :] = [last.rstrip() + dots]
    return lines


def _head(text: str, font: _Font, width: int) -> str:
    """As many characters as fit, at least one."""
    return next(text[:n] for n in range(len(text), 0, -1) if n == 1 or font.getlength(text[:n]) <= width)


def step_of(path: Path) -> int | None:
    """Step of a row of previews, or of the folder of its images; None for a file of somebody else's."""
    found = _ROW_NAME.fullmatch(path.name)
    return None if found is None else int(found[1])


def write_strip(samples: Path, *, up_to_step: int) -> Path | None:
    """Stack the pictures of all times into `samples/strip.png`, oldest on top; None where there is none.

    Large ones are made smaller, and of very many an even choice with the first and the last is taken.
    """
    found = {path: step_of(path) for path in sorted(samples.glob("step-*.png"))}
    paths = [path for path, step in found.items() if step is not None and step <= up_to_step]
    if not paths:
        return None
    sizes = []
    for path in paths:
        with Image.open(path) as picture:
            sizes.append(picture.size)
    scale = min(1.0, _STRIP_WIDTH / max(width for width, _ in sizes))
    rows = [(max(1, round(width * scale)), max(1, round(height * scale))) for width, height in sizes]
    count = min(len(paths), max(2, _STRIP_HEIGHT // max(height for _, height in rows)))
    chosen = [round(i * (len(paths) - 1) / max(1, count - 1)) for i in range(count)]
    strip = Image.new("RGB", (max(rows[i][0] for i in chosen), sum(rows[i][1] for i in chosen)), "white")
    top = 0
    for i in chosen:
        with Image.open(paths[i]) as picture:
            strip.paste(picture.convert("RGB").resize(rows[i], Image.Resampling.LANCZOS), (0, top))
        top += rows[i][1]
    target = samples / "strip.png"
    write_png(strip, target)
    return target


def write_png(picture: Image.Image, path: Path, text: Mapping[str, str] | None = None) -> None:
    """Write a PNG, with `text` inside, so that nobody sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    for key, value in (text or {}).items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", pnginfo=info)
    atomic.write_bytes(path, buffer.getvalue())


def read_png(path: Path) -> tuple[Image.Image, dict[str, str]]:
    """A picture that `write_png` wrote, in RGB, and the text inside. Raises OSError."""
    with Image.open(path) as picture:
        text = {str(key): str(value) for key, value in picture.info.items() if isinstance(value, str)}
        return picture.convert("RGB"), text
