"""Contact sheets of previews: a row per time, a strip of all times, before over after. No torch."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from trainer.files import atomic
from trainer.files.steps import by_step

_CELL_MINIMUM, _CELL_MAXIMUM = 192, 384
_MARGIN = 8
_TEXT_LINES = 2
_STRIP_WIDTH, _STRIP_HEIGHT = 2048, 16384
ROW_PIXELS = 40_000_000
"""Most pixels of a row, which is read again and again; Pillow refuses to open 179 million."""

MOST_COMPARED = 80
"""Most prompts of a before-and-after picture: 34 million pixels of large cells with long captions."""
_PAGE_WIDTH, _PAGE_COLUMNS = 1700, 8
_PAGE_MARGIN, _PAGE_GAP, _ROW_GAP, _BLOCK_GAP = 20, 12, 16, 28
_CAPTION_LINES = 4
_CARD_PIXELS, _CARD_TEXT_SIZE, _CARD_LINES = 512, 24, 15
_TITLE_COLOUR, _CAPTION_COLOUR, _FRAME_COLOUR = "#1f2328", "#59636e", "#d1d9e0"
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def row(images: Sequence[Image.Image], captions: Sequence[str], title: str) -> Image.Image:
    """Pictures side by side under a title, each with its caption below; small pictures are enlarged to be
    seen, and all are made smaller where the row would have more than ROW_PIXELS, which `smaller` tells.
    """
    images = _same_size(images)
    width, height = _row_cell(*images[0].size, len(images))
    smooth = Image.Resampling.LANCZOS if width < images[0].width else Image.Resampling.NEAREST
    font_size = _row_font_size(width)
    font, line = ImageFont.load_default(size=font_size), font_size + 4
    picture = Image.new("RGB", _row_size(width, height, len(images)), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((_MARGIN, _MARGIN // 2), title, fill="black", font=font)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = _MARGIN + number * (width + _MARGIN)
        picture.paste(image.resize((width, height), smooth), (left, line + _MARGIN))
        wrapped = textwrap.wrap(caption, width=max(8, int(width / (font_size * 0.5))), max_lines=_TEXT_LINES)
        draw.multiline_text((left, line + height + 2 * _MARGIN), "\n".join(wrapped), fill="black", font=font)
    return picture


def smaller(images: Sequence[Image.Image]) -> str:
    """Words for how small `row` shows these pictures; empty where it shows all of their pixels."""
    width, height = _largest(images)
    cell = _row_cell(width, height, len(images))
    told = f" ({len(images)} pictures of {width}x{height}, each as {cell[0]}x{cell[1]})"
    return told if cell[0] < width else ""


def _row_cell(width: int, height: int, count: int) -> tuple[int, int]:
    """Width and height in a row of `count` pictures of this size: the largest cell of this shape, but for
    rounding, with which it has at most ROW_PIXELS.
    """
    enlarge = max(1, -(-_CELL_MINIMUM // width))
    whole = width, height = width * enlarge, height * enlarge
    while math.prod(_row_size(width, height, count)) > ROW_PIXELS and width > 1:
        width -= -(-width // 32)
        height = max(1, whole[1] * width // whole[0])
    return width, height


def _row_font_size(width: int) -> int:
    return max(12, width // 22)


def _row_size(width: int, height: int, count: int) -> tuple[int, int]:
    """Width and height of a row of `count` cells with their captions, in pixels."""
    line = _row_font_size(width) + 4
    return (width + _MARGIN) * count + _MARGIN, line + height + line * _TEXT_LINES + 3 * _MARGIN


def shown(drawn: Image.Image | str) -> Image.Image:
    """A picture unchanged; a text drawn on a card."""
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
    """Pictures, each in the middle of a white sheet of one size."""
    width, height = _largest(images)
    sheets = []
    for image in images:
        if image.size == (width, height) and image.mode == "RGB":
            sheets.append(image)  # hundreds of large ones are gigabytes
            continue
        sheet = Image.new("RGB", (width, height), "white")
        sheet.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
        sheets.append(sheet)
    return sheets


def _largest(images: Sequence[Image.Image]) -> tuple[int, int]:
    """The largest width and the largest height."""
    return max(image.width for image in images), max(image.height for image in images)


def compared(drawn: Image.Image | str) -> Image.Image:
    """Picture of what was drawn, no larger than `before_after` shows it: hundreds take gigabytes else."""
    image = shown(drawn)
    scale = _CELL_MAXIMUM / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS) if scale < 1 else image


def first_of(count: int) -> str:
    """Words for the prompts that `before_after` leaves out of `count`; empty where it shows all."""
    left_out = count > MOST_COMPARED
    return f" (the first {MOST_COMPARED} of {count} prompts)" if left_out else ""


@dataclass(frozen=True, kw_only=True)
class _Page:
    """Measures of a before-and-after picture, in pixels, and its fonts."""

    cell: tuple[int, int]
    """Width and height of a picture."""
    lefts: tuple[int, ...]
    """Left edge of each column; the last block may have fewer columns."""
    title_font: _Font
    title_line: int
    caption_font: _Font
    caption_line: int


def _page(width: int, height: int, count: int) -> _Page:
    """Small pictures are enlarged by a whole number, large ones made smaller; blocks are equally full."""
    longest = max(width, height)
    scale = max(1, -(-_CELL_MINIMUM // longest)) if longest <= _CELL_MAXIMUM else _CELL_MAXIMUM / longest
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    fitting = (_PAGE_WIDTH - 2 * _PAGE_MARGIN + _PAGE_GAP) // (cell[0] + _PAGE_GAP)
    blocks = -(-count // min(_PAGE_COLUMNS, fitting))
    caption_size = max(15, round(max(cell) / 16))
    title_size = round(caption_size * 1.2)
    return _Page(
        cell=cell,
        lefts=tuple(_PAGE_MARGIN + column * (cell[0] + _PAGE_GAP) for column in range(-(-count // blocks))),
        title_font=ImageFont.load_default(size=title_size),
        title_line=round(title_size * 1.6),
        caption_font=ImageFont.load_default(size=caption_size),
        caption_line=round(caption_size * 1.3),
    )


def before_after(
    rows: Sequence[Sequence[Image.Image]], captions: Sequence[str], titles: Sequence[str]
) -> Image.Image:
    """Two rows of pictures of the same captions, one over the other, each under its title.

    rows: before and after. More columns than fit become further blocks below; only the first MOST_COMPARED
    captions and pictures are shown, which `first_of` tells.
    """
    captions, rows = captions[:MOST_COMPARED], [images[:MOST_COMPARED] for images in rows]
    both = _same_size([image for images in rows for image in images])
    page = _page(*both[0].size, len(captions))
    (cell_width, cell_height), columns = page.cell, len(page.lefts)
    texts = [_wrapped(caption, page.caption_font, cell_width) for caption in captions]
    blocks = [slice(start, start + columns) for start in range(0, len(captions), columns)]
    heights = [
        2 * (page.title_line + cell_height + _ROW_GAP) + max(map(len, texts[block])) * page.caption_line
        for block in blocks
    ]
    ends = [_PAGE_MARGIN + round(page.title_font.getlength(title)) for title in titles]
    size = (
        max(page.lefts[-1] + cell_width, *ends) + _PAGE_MARGIN,
        2 * _PAGE_MARGIN + sum(heights) + _BLOCK_GAP * (len(blocks) - 1),
    )
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    top = _PAGE_MARGIN
    for block, height in zip(blocks, heights, strict=True):
        y = top
        for title, images in zip(titles, (both[: len(captions)], both[len(captions) :]), strict=True):
            draw.text((_PAGE_MARGIN, y), title, fill=_TITLE_COLOUR, font=page.title_font)
            y += page.title_line
            for left, image in zip(page.lefts, images[block], strict=False):
                # around the picture, not on it: one on white ends somewhere
                frame = (left - 1, y - 1, left + cell_width, y + cell_height)
                draw.rectangle(frame, outline=_FRAME_COLOUR)
                picture.paste(image.resize(page.cell, Image.Resampling.LANCZOS), (left, y))
            y += cell_height + _ROW_GAP
        for left, lines in zip(page.lefts, texts[block], strict=False):
            for number, text in enumerate(lines):
                place = (left, y + number * page.caption_line)
                draw.text(place, text, fill=_CAPTION_COLOUR, font=page.caption_font)
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
        while rest and len(lines) <= most:  # one more line shows that there are dots to write
            lines.append(_head(rest, font, width))
            rest = rest[len(lines[-1]) :]
    if len(lines) > most:
        dots = "..."
        last = _head(lines[most - 1], font, width - round(font.getlength(dots)))
        lines[most - 1 :] = [last.rstrip() + dots]
    return lines


def _head(text: str, font: _Font, width: int) -> str:
    """The longest beginning that fits, at least one character.

    It is looked for by halves: a text without blanks, as Chinese ones are, is measured a few times.
    """
    fits, beyond = 1, len(text) + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if font.getlength(text[:middle]) <= width:
            fits = middle
        else:
            beyond = middle
    return text[:fits]


def write_strip(samples: Path) -> Path:
    """Stack the rows of all times, of which there is one at least, into `samples/strip.png`, oldest on top.

    Large ones are made smaller, and of very many an even choice with the first and the last is taken.
    """
    paths = [path for _, path in by_step(samples.glob("step-*.png"))]
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
    """Write a PNG atomically, with `text` inside.

    It is packed fast rather than tightly, half the time for a tenth more bytes: a run waits for its pictures.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    for key, value in (text or {}).items():
        info.add_itxt(key, value)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", pnginfo=info, compress_level=1)
    with atomic.writing(path) as file:
        file.write(buffer.getvalue())


def read_png(path: Path) -> tuple[Image.Image, dict[str, str]]:
    """A picture that `write_png` wrote, in RGB, and the text inside. Raises OSError."""
    try:
        with Image.open(path) as picture:
            text = {str(key): str(value) for key, value in picture.info.items() if isinstance(value, str)}
            return picture.convert("RGB"), text
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(str(error)) from error  # by others: a text of megabytes, more pixels than Pillow takes
