"""`beheld models`: which families run, which are refused and why, and short names of checkpoints."""

from __future__ import annotations

import argparse

from beheld.families import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the page docs/models.md")
    form.add_argument("--short", action="store_true", help="print the checkpoints that have short names")
    form.add_argument(
        "--fits",
        action="store_true",
        help="print those that fit this machine, and how: rounded at load where they do not fit as they are",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    if arguments.markdown:
        print(page.markdown(), end="")
    elif arguments.short or arguments.fits:
        _print_short(only_fitting=arguments.fits)
    else:
        _print_families()
    return 0


def _print_families() -> None:
    print("runs, and answers as transformers does: alone, in batches, after preemption, and with")
    for row in page.tested():
        print(f"  {row.name:18} {', '.join(('text', *row.modalities)):26} {row.example:50} {page.checked(row)}")
    print("refused")
    for name, reason in page.refused().items():
        print(f"  {name:18} {reason}")


def _print_short(only_fitting: bool) -> None:
    from beheld.tools.fits import fits, machine

    platform, room = machine()
    print(f"on the {platform.label}, with room for {room / 2**30:.1f} GiB")
    layouts = {row.name: row for row in page.tested()}
    print(f"  {'name':24} {'memory, GiB':>11}  {'how':9}  {'takes':19}  {'good at':45}  {'licence':27}  repository")
    for each in fits():
        short = each.short
        if only_fitting and not each.fits:
            continue
        how = "too large" if not each.fits else each.quantization or ""
        takes = ", ".join(layouts[short.layout].modalities)
        print(
            f"  {short.name:24} {each.bytes / 2**30:11.1f}  {how:9}  {takes:19}  {short.good_at:45}  "
            f"{short.licence:27}  {short.repository}"
        )
    print("Ask one with `beheld ask -m NAME ...`; where the third column names a type, add --quantization with it.")
