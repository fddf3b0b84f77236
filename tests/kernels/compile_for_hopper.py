"""Compile kernels for sm_90 on a machine without a GPU and print, as JSON, what the assembler made of them.

Spills are counted in the loops: a value kept aside once before a long loop costs nothing.

Run as a script, because Triton cannot compile in a process that uses its interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tokenmill.kernels import (
    hopper_decode,
    hopper_gated,
    hopper_heads,
    hopper_linear,
    hopper_pages,
    hopper_prefill,
    hopper_shared,
    product_tilings,
    triton_balanced,
    triton_decode,
    triton_linear,
    triton_lookup,
    triton_norm,
    triton_prefill,
    triton_rotary,
)
from tokenmill.kernels.runs import RunShape
from tokenmill.kernels.sharing import ITEM_FIELDS

HOPPER = GPUTarget("cuda", 90, 32)
ORDER = {"ACQBULK": "W", "PREEXIT": "B", "STG": "S", "UTMASTG": "S", "EXIT": "E"}


def compiled(
    kernel: Any,
    pointers: dict[str, str],
    scalars: dict[str, str],
    constants: dict[str, Any],
    **options: int | None,
) -> dict[str, Any]:
    """Registers, local memory, shared memory and tensor-core instructions of one variant.

    Strides are multiples of 16 and addresses are aligned to it, where the kernels count on it.
    """
    signature = {name: "constexpr" for name in constants}
    signature |= {name: f"*{kind}" for name, kind in pointers.items()} | scalars
    order = [parameter.name for parameter in kernel.params]
    aligned = [
        name
        for name in order
        if name in ALIGNED or name in STRIDES or name in OWN_STRIDES or name.endswith(("_outer", "_inner"))
        if not signature[name].startswith("tensordesc")
    ]
    attributes = {(order.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature={name: signature[name] for name in order},
        constexprs={(order.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    binary = triton.compile(source, target=HOPPER, options=options)
    return {"shared": binary.metadata.shared, **_assembled(binary.asm["cubin"])}


def _assembled(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    loops = _product_loops(sass)
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
    return {
        "registers": int(resources["REG"]),
        "stack": int(resources["STACK"]),
        "spills": max((loop["spills"] for loop in loops), default=0),
        "loops": loops,
        "HGMMA": sass.count("HGMMA"),
        "product_waits": sass.count("WARPGROUP.DEPBAR"),
        "HMMA": sass.count("HMMA"),
        "wide_copies": len(re.findall(r"LDGSTS\.E\.(?:[A-Z0-9.]*\.)?128", sass)),
        "copies": sass.count("LDGSTS"),
        # Of a kernel that waits for the one before it: what it does until then.
        "early_loads": len(re.findall(r"LDG\.E\.(?:[A-Z0-9.]*\.)?128", sass.partition("ACQBULK")[0])),
        "early_tile_copies": sass.partition("ACQBULK")[0].count("UTMALDG"),
        "wide_stores": len(re.findall(r"STG\.E\.(?:[A-Z0-9.]*\.)?128", sass)),
        "stores": sass.count("STG"),
        "single_roundings": sass.count("F2F.BF16.F32"),  # of one number, by a slow unit
        # Where it waits (W), lets the next one begin (B), stores (S) and ends (E).
        "order": "".join(ORDER[word] for word in re.findall(r"\b(ACQBULK|PREEXIT|STG|UTMASTG|EXIT)\b", sass)),
        "lets_next_begin_at_once": 0 <= sass.find("PREEXIT") < sass.find("ACQBULK"),
    }


def _product_loops(sass: str) -> list[dict[str, int]]:
    """What the innermost loops with tensor-core products hold, in order."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", sass)]
    spans = []
    for at, text in code:
        back = re.search(r"\bBRA.*?0x([0-9a-f]+)", text)
        if back and int(back[1], 16) < at:
            spans.append((int(back[1], 16), at))
    loops = {span: [text for at, text in code if span[0] <= at <= span[1]] for span in spans}
    loops = {span: texts for span, texts in loops.items() if any("MMA" in text for text in texts)}
    innermost = [
        texts
        for span, texts in sorted(loops.items())
        if not any(span[0] <= other[0] and other[1] <= span[1] and other != span for other in loops)
    ]
    return [
        {
            "instructions": len(texts),
            "spills": sum("LDL" in text or "STL" in text for text in texts),
            "tile_copies": sum("UTMALDG" in text for text in texts),
            "exponentials_in_flight": _exponentials_in_flight(texts),
            "exponentials_beside_values": _exponentials_beside_values(texts),
        }
        for texts in innermost
    ]


def _exponentials_in_flight(loop: list[str]) -> int:
    """Exponentials that a loop starts after it has waited for a product and begun another."""
    wait = next((index for index, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text), 0)
    after = loop[wait:] + loop[:wait]
    product = next(index for index, text in enumerate(after) if "MMA" in text)
    return sum("MUFU.EX2" in text for text in after[product:])


def _exponentials_beside_values(loop: list[str]) -> int:
    """Exponentials between a wait that leaves one product running and a wait for all of them."""
    waits = [index for index, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
    leaving = [index for index in waits if "gsb0, 0x1" in loop[index]]
    if not leaving:
        return 0
    finish = next((index for index in waits if index > leaving[0]), len(loop))
    return sum("MUFU.EX2" in text for text in loop[leaving[0] : finish])


STRIDES = dict.fromkeys(
    ("stride_qt", "stride_qh", "stride_page", "stride_token", "stride_head", "stride_ot", "stride_oh"), "i32"
)
OWN_STRIDES = dict.fromkeys(("stride_kt", "stride_kh", "stride_vt", "stride_vh"), "i32")
ALIGNED = {"q", "k", "v", "key_cache", "value_cache", "out", "x", "residual", "weight", "total", "scale"}
ALIGNED |= {"bias", "qkv", "cos", "sin", "q_weight", "k_weight", "q_out", "k_out", "stride_x"}
ALIGNED |= {f"stride_{name}" for name in ("residual", "qkv_head", "cos", "sin", "slot")}
ALIGNED |= {"parts", "logs", "num_outputs"}
PAGES = f"tensordesc<bf16[1, 1, 16, 64],{hopper_pages.PAGE_LAYOUT!r}>"
CACHES = {"key_cache": "bf16", "value_cache": "bf16", "page_table": "i32", "lengths": "i32"}


def decode(
    head_dim: int, group: int, *, fold: int = 1, single: bool = False, shared: bool = False
) -> dict[str, Any]:
    block_dim = triton.next_power_of_2(head_dim * fold)
    block_group = max(16, triton.next_power_of_2(group * fold))
    tiling = triton_decode.own_tiling(block_dim, block_group, 2, beside_shared=shared)
    constants = {
        "GROUP": group,
        "FOLD": fold,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "WINDOW": 0,
        "SHARED": shared,
        "SINGLE": single,
        "BLOCK_G": block_group,
        "BLOCK_N": tiling.keys,
        "BLOCK_DIM": block_dim,
        "OVERLAP": shared,
    }
    forest = {"own_starts": "i32", "num_pieces": "i32"}
    pointers = {"q": "bf16", **CACHES, **forest, "out": "bf16", "parts": "fp32", "logs": "fp32"}
    scalars = {
        "scale_log2": "fp32",
        "max_splits": "i32",
        "min_split": "i32",
        "room": "i32",
        "stride_table": "i32",
        **STRIDES,
    }
    options = {
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "maxnreg": tiling.registers,
    }
    return compiled(triton_decode._own_kernel, pointers, scalars, constants, **options)


def shared(head_dim: int, group: int) -> dict[str, Any]:
    tiling = triton_decode.shared_tiling(head_dim, 2)
    constants = {
        "KEY_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "FIELDS": ITEM_FIELDS,
        "BLOCK_M": triton.next_power_of_2(tiling.queries // group * group),
        "BLOCK_N": tiling.keys,
        "BLOCK_DIM": triton.next_power_of_2(head_dim),
    }
    forest = {"num_items": "i32", "items": "i32", "members": "i32"}
    pointers = {"q": "bf16", **CACHES, **forest, "parts": "fp32", "logs": "fp32"}
    del pointers["lengths"]
    strides = {name: kind for name, kind in STRIDES.items() if name not in ("stride_ot", "stride_oh")}
    scalars = {"scale_log2": "fp32", "room": "i32", "stride_table": "i32", **strides}
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return compiled(triton_decode._shared_kernel, pointers, scalars, constants, **options)


def prefill(
    head_dim: int, group: int, *, window: int = 0, tiling: triton_prefill.PrefillTiling | None = None
) -> dict[str, Any]:
    tiling = tiling or triton_prefill.prefill_tiling(head_dim, 2, 4096)
    whole = tiling.whole or triton_prefill.KeyTile(0, 0)
    block_dim = triton.next_power_of_2(head_dim)
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "WINDOW": window,
        "ROWS_PER_SEARCH": triton_prefill.ROWS_PER_SEARCH,
        "BLOCK_M": tiling.queries,
        "BLOCK_N": whole.keys,
        "BLOCK_GATHER": tiling.gathered.keys,
        "BLOCK_PREFIX": tiling.prefix.keys,
        "BLOCK_DIM": block_dim,
        "STAGES": whole.stages,
        "GATHER_STAGES": tiling.gathered.stages,
        "PREFIX_STAGES": tiling.prefix.stages,
        "OVERLAP": tiling.overlap,
    }
    pointers = {"q": "bf16", "k": "bf16", "v": "bf16", **CACHES, "query_starts": "i32", "out": "bf16"}
    scalars = {"scale_log2": "fp32", "num_rows": "i32", "stride_table": "i32", **STRIDES, **OWN_STRIDES}
    tiles = dict.fromkeys(("k_tiles", "v_tiles"), f"tensordesc<bf16[1, {whole.keys}, {block_dim}]>")
    constants |= {} if tiling.whole else dict.fromkeys(tiles)
    options = {"num_warps": tiling.num_warps, "maxnreg": tiling.max_registers}
    return compiled(
        triton_prefill._prefill_kernel,
        pointers,
        scalars | (tiles if tiling.whole else {}),
        constants,
        **options,
    )


def hopper(head_dim: int, group: int) -> dict[str, Any]:
    tiling = hopper_prefill.hopper_tiling(head_dim)
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "ROWS_PER_SEARCH": hopper_prefill.ROWS_PER_SEARCH,
        "BLOCK_N": tiling.keys,
        "STAGES": tiling.stages,
    }
    step = f"tensordesc<bf16[{tiling.keys}, {head_dim}],{hopper_prefill.STEP_LAYOUT!r}>"
    pointers = {"q": "bf16", "out": "bf16"}
    pointers |= dict.fromkeys(("page_table", "query_starts", "lengths", "taken"), "i32")
    names = ("num_rows", "num_tiles", "num_kv_heads", "stride_table", "stride_h", "stride_qt", "stride_qh")
    scalars = {
        "scale_log2": "fp32",
        **dict.fromkeys((*names, "stride_ot", "stride_oh"), "i32"),
        "k_step": step,
        "v_step": step,
        "k_cache": PAGES,
        "v_cache": PAGES,
    }
    return compiled(hopper_prefill._prefill_kernel, pointers, scalars, constants, num_warps=4)


def hopper_prefixes(head_dim: int, group: int) -> dict[str, Any]:
    tiling = hopper_shared.hopper_tiling(head_dim)
    constants = {
        "KEY_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "FIELDS": ITEM_FIELDS,
        "BLOCK_N": tiling.keys,
        "STAGES": tiling.stages,
        "ARE_NEW": False,
        "OVERLAP": True,
    }
    names = ("q", "page_table", "num_items", "items", "members", "parts", "logs")
    pointers = dict(zip(names, ("bf16", *["i32"] * 4, "fp32", "fp32"), strict=True))
    scalars = {"k_cache": PAGES, "v_cache": PAGES, "scale_log2": "fp32"}
    scalars |= dict.fromkeys(("room", "stride_qt", "stride_qh", "stride_table"), "i32")
    return compiled(hopper_shared._shared_kernel, pointers, scalars, constants, num_warps=4)


def runs(head_dim: int, group: int, *, have_short: bool = True) -> dict[str, Any]:
    tiling = hopper_decode.decode_tiling(head_dim)
    queries = -(-group // hopper_decode.QUERIES) * hopper_decode.QUERIES
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "BLOCK_G": 16,
        "BLOCK_Q": queries,
        "BLOCK_N": tiling.keys,
        "STAGES": hopper_decode.STAGES if have_short else hopper_decode.STAGES_OF_FEW,
        "HAVE_SHORT": have_short,
        "OVERLAP": True,
    }
    scalars = {
        "q": f"tensordesc<bf16[1, {queries}, 64],{hopper_decode.QUERY_LAYOUT!r}>",
        "k_cache": PAGES,
        "v_cache": PAGES,
        "scale_log2": "fp32",
        **dict.fromkeys(
            ("are_new", "num_runs", "stride_tile", "stride_table", "stride_ot", "stride_oh"), "i32"
        ),
    }
    names = ("page_table", "tiles", "cuts", "taken", "out", "parts", "logs")
    pointers = dict(zip(names, (*["i32"] * 4, "bf16", "fp32", "fp32"), strict=True))
    options = {"num_warps": 4, "maxnreg": tiling.registers}
    return compiled(hopper_decode._decode_kernel, pointers, scalars, constants, **options)


def join(head_dim: int, group: int, *, num_rows: int, num_programs: int) -> dict[str, Any]:
    shape = RunShape(64, num_programs, num_programs, for_hopper=True)
    tiling = triton_balanced.join_tiling(shape, num_rows, head_dim)
    pointers = {"parts": "fp32", "logs": "fp32", "cuts": "i32", "joins": "i32", "taken": "i32", "out": "bf16"}
    scalars = dict.fromkeys(("num_runs", "stride_ot", "stride_oh"), "i32")
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_G": 16, "BLOCK_DIM": tiling.numbers}
    constants |= {"PIECES": tiling.pieces, "OVERLAP": True}
    return compiled(triton_balanced._join_kernel, pointers, scalars, constants, num_warps=tiling.warps)


def lookup(size: int, other_size: int) -> dict[str, Any]:
    pointers = dict.fromkeys(("table", "found", "other_table", "other_found"), "bf16")
    pointers |= {"ids": "i32", "places": "i64"}
    block = min(triton_lookup.MOST_AT_ONCE, triton.next_power_of_2(size))
    constants = {"SIZE": size, "OTHER_SIZE": other_size, "BLOCK": block}
    constants |= {"OTHER_BLOCK": triton.next_power_of_2(other_size), "OVERLAP": True}
    return compiled(triton_lookup._look_up_kernel, pointers, {}, constants, num_warps=4)


def norm(size: int) -> dict[str, Any]:
    pointers = {"x": "fp32", "residual": "bf16", "weight": "bf16", "out": "bf16", "total": "bf16"}
    strides = ("stride_outer", "stride_inner", "residual_stride_outer", "residual_stride_inner")
    scalars = {"epsilon": "fp32", "num_rows": "i32", "inner": "i32", **dict.fromkeys(strides, "i32")}
    constants = {"SIZE": size, "BLOCK_ROWS": 1, "BLOCK_SIZE": triton.next_power_of_2(size)}
    constants |= {"OVERLAP": True, "PIECES": 4}
    scalars["stride_piece"] = "i32"
    return compiled(triton_norm._add_rms_norm_kernel, pointers, scalars, constants, num_warps=8)


def linear(
    size: int, outputs: int, *, rows: int = 1, normed: bool = False, gated: bool = False, bias: bool = False
) -> dict[str, Any]:
    pointers = {"x": "bf16", "weight": "bf16", "out": "bf16"}
    pointers |= {"bias": "bf16"} if bias else {}
    scalars = {"num_rows": "i32", "num_outputs": "i32", "stride_x": "i32"}
    constants: dict[str, Any] = {"SIZE": size, "GATED": gated, "OVERLAP": True}
    constants |= {} if bias else {"bias": None}
    tiling = triton_linear.choose_tiling(size, outputs, gated)
    normed_only = ("residual", "scale", "total")
    pointers |= dict.fromkeys(normed_only, "bf16") if normed else {}
    constants |= {} if normed else dict.fromkeys(normed_only, None)
    scalars |= {"epsilon": "fp32", "stride_residual": "i32"}
    constants |= {"ROWS": rows, "BLOCK_OUTPUTS": tiling.outputs, "BLOCK_SIZE": triton.next_power_of_2(size)}
    return compiled(triton_linear._linear_kernel, pointers, scalars, constants, num_warps=tiling.num_warps)


def product(
    num_rows: int,
    size: int,
    outputs: int,
    *,
    gated: bool = False,
    may_split: bool = False,
    bias: bool = False,
    added: bool = False,
    parts: int = 0,
) -> dict[str, Any]:
    """`added`: to a residual, with squares for a norm; of rows whose squares come in so many `parts`."""
    tiling = product_tilings.choose_tiling(
        num_rows, size, outputs, gated=gated, may_split=may_split or added, processors=132
    )
    assert tiling is not None
    if added:
        tiling = dataclasses.replace(tiling, pieces=1)
    weights, more = (width // 2 if gated else width for width in (tiling.outputs, tiling.more))
    constants = {
        "GATED": gated,
        "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.outputs,
        "MORE_N": tiling.more,
        "BLOCK_K": tiling.inputs,
        "STAGES": tiling.stages,
        "OVERLAP": True,
        "AT_ONCE": hopper_linear._numbers_at_once(2 if tiling.pieces == 1 else 4, outputs),
        "PARTS": parts,
        "WEIGHTS_LEFT": tiling.weights_left,
        "IS_FED": gated or tiling.is_fed,
    }
    left_out = [] if bias else ["bias"]
    left_out += [] if tiling.more else ["more_weight"]
    left_out += [] if added else ["residual", "norm", "total"]
    left_out += [] if added or parts else ["squares"]
    constants |= dict.fromkeys(left_out)
    kinds = {
        "out": "bf16" if tiling.pieces == 1 else "fp32",
        **dict.fromkeys(("bias", "residual", "norm", "total"), "bf16"),
        "squares": "fp32",
    }
    pointers = {name: kind for name, kind in kinds.items() if name not in left_out}
    layout = hopper_linear.TILE_LAYOUT
    scalars = {
        "x": f"tensordesc<bf16[{tiling.rows}, {tiling.inputs}],{layout!r}>",
        "weight": f"tensordesc<bf16[{weights}, {tiling.inputs}],{layout!r}>",
        **({"more_weight": f"tensordesc<bf16[{more}, {tiling.inputs}],{layout!r}>"} if more else {}),
        "epsilon": "fp32",
        **dict.fromkeys(
            ("num_rows", "num_outputs", "size", "total_steps", "piece_steps", "num_parts"), "i32"
        ),
    }
    options = {"num_warps": tiling.num_warps, "maxnreg": tiling.registers}
    facts = compiled(hopper_linear._product_kernel, pointers, scalars, constants, **options)
    # Boxes of 64 inputs, of both halves of a tile and of two tiles beside each other. A warp asks for one.
    boxes = (tiling.inputs // 64 if gated or tiling.is_fed else 1) * (2 if gated else 1)
    is_half = tiling.registers is not None
    facts |= {"is_half": is_half, "is_fed": gated or tiling.is_fed}
    return facts | {"weight_boxes": boxes * (2 if tiling.more else 1)}


def gated_product(tiling: hopper_gated.GatedTiling) -> dict[str, Any]:
    rows, inputs = hopper_gated.BLOCK_ROWS, hopper_gated.BLOCK_INPUTS
    constants = {
        "BLOCK_M": rows,
        "BLOCK_F": tiling.outputs,
        "BLOCK_K": inputs,
        "STAGES": tiling.stages,
        "GROUP": hopper_gated.GROUP_BLOCKS,
        "OVERLAP": True,
    }
    boxes = {"x": (rows, inputs), "weight": (tiling.outputs, inputs), "out": (rows, tiling.outputs)}
    layout = hopper_linear.TILE_LAYOUT
    scalars = {
        **{name: f"tensordesc<bf16[{box[0]}, {box[1]}],{layout!r}>" for name, box in boxes.items()},
        **dict.fromkeys(("blocks", "columns", "num_outputs", "steps"), "i32"),
    }
    return compiled(hopper_gated._gated_kernel, {}, scalars, constants, num_warps=rows // 16)


def rotate_and_store(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    half, elements = head_dim // 2, triton_rotary.ELEMENTS_PER_PROGRAM
    names = ("qkv", "cos", "sin", "q_weight", "k_weight", "q_out", "k_out", "key_cache", "value_cache")
    strides = ("token", "qkv_head", "cos", "sin", "page", "slot", "head")
    constants = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "PAGE_SIZE": 16,
        "BLOCK_HEADS": elements // head_dim,
        "BLOCK_HALF": half,
        "BLOCK_REST": 1,
        "OVERLAP": True,
    }
    pointers = {**dict.fromkeys(names, "bf16"), "slots": "i64"}
    scalars = {"epsilon": "fp32", **{f"stride_{name}": "i32" for name in strides}}
    return compiled(triton_rotary._rotate_and_store_kernel, pointers, scalars, constants, num_warps=4)


def heads(
    num_rows: int,
    size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    normed: bool = False,
    parts: int = 0,
) -> dict[str, Any]:
    """Queries, keys and values; with a bias where nothing is normalised. Of rows with so many `parts`."""
    tiling = product_tilings.choose_heads_tiling(
        num_rows,
        size,
        (heads + 2 * kv_heads) * head_dim,
        head_dim=head_dim,
        are_whole=normed,
        processors=132,
    )
    assert tiling is not None
    constants = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.outputs,
        "BLOCK_K": tiling.inputs,
        "STAGES": tiling.stages,
        "AT_ONCE": hopper_heads.AT_ONCE,
        "PARTS": parts,
        "OVERLAP": True,
    }
    left_out = ("bias",) if normed else ("q_weight", "k_weight")
    left_out += () if parts else ("squares",)
    names = ("bias", "cos", "sin", "q_weight", "k_weight", "q_out", "key_cache", "value_cache")
    pointers = {**dict.fromkeys((name for name in names if name not in left_out), "bf16"), "slots": "i64"}
    pointers |= {"squares": "fp32"} if parts else {}
    constants |= dict.fromkeys(left_out)
    boxes = {"x": [tiling.rows, tiling.inputs], "weight": [tiling.outputs // 2, tiling.inputs]}
    scalars = {
        **{name: f"tensordesc<bf16{box},{hopper_linear.TILE_LAYOUT!r}>" for name, box in boxes.items()},
        **dict.fromkeys(("num_rows", "size", "steps", "num_parts"), "i32"),
        **{f"stride_{name}": "i32" for name in ("cos", "sin", "page", "slot", "head")},
        **dict.fromkeys(("head_epsilon", "epsilon"), "fp32"),
    }
    facts = compiled(hopper_heads._heads_kernel, pointers, scalars, constants, num_warps=tiling.num_warps)
    return facts | {"weight_boxes": 2, "is_half": False, "is_fed": False}


if __name__ == "__main__":
    json.dump(
        {
            "decode 64": decode(64, 7, single=True),
            "decode 128 split": decode(128, 4),
            "decode 64 own": decode(64, 7, fold=2, shared=True),
            "decode 128 own": decode(128, 2, shared=True),
            "decode 128 own, many queries": decode(128, 32, shared=True),
            "decode 256 own": decode(256, 2, shared=True),
            "shared 64": shared(64, 7),
            "shared 128": shared(128, 2),
            "shared 256": shared(256, 2),
            "prefill 64 window": prefill(64, 7, window=512),
            "prefill 64": prefill(64, 7),
            "prefill 128 few": prefill(128, 2, tiling=triton_prefill.prefill_tiling(128, 2, 64)),
            "prefill 96": prefill(96, 3),
            "prefill 128": prefill(128, 4),
            "prefill 256": prefill(256, 2),
            "hopper 64": hopper(64, 7),
            "hopper 128": hopper(128, 4),
            "hopper shared 64": hopper_prefixes(64, 7),
            "hopper shared 128": hopper_prefixes(128, 2),
            "runs 64": runs(64, 7),
            "runs 64, equal": runs(64, 7, have_short=False),
            "runs 128": runs(128, 4),
            "runs 128, many queries": runs(128, 12),
            "runs 128, equal, many queries": runs(128, 12, have_short=False),
            "join 64": join(64, 7, num_rows=64, num_programs=198),
            "join 64, few rows": join(64, 7, num_rows=4, num_programs=198),
            "join 64, one row": join(64, 7, num_rows=1, num_programs=198),
            "join 128, one row": join(128, 8, num_rows=1, num_programs=132),
            "norm 4096": norm(4096),
            "lookup 896": lookup(896, 64),
            "lookup 5120": lookup(5120, 128),
            "linear qkv 0.5B": linear(896, 1152, normed=True, bias=True),
            "linear gate_up 0.5B": linear(896, 4864, normed=True, gated=True),
            "linear down 0.5B": linear(4864, 896),
            "linear gate_up 8B": linear(4096, 14336, normed=True, gated=True),
            "linear down 8B": linear(14336, 4096),
            "linear gate_up 14B": linear(5120, 17408, normed=True, gated=True),
            "linear down 14B": linear(17408, 5120),
            "linear qkv 0.5B, two rows": linear(896, 1152, rows=2, normed=True, bias=True),
            "linear gate_up 0.5B, two rows": linear(896, 4864, rows=2, normed=True, gated=True),
            "linear down 0.5B, two rows": linear(4864, 896, rows=2),
            "product qkv 0.5B": product(8, 896, 1152, bias=True),
            "product qkv 0.6B, many rows": product(128, 1024, 4096),
            "product logits 0.5B": product(64, 896, 151936),
            "product gate_up 0.5B": product(64, 896, 4864, gated=True),
            "product gate_up 0.5B, many rows": product(128, 896, 4864, gated=True),
            "product gate_up 8B": product(64, 4096, 14336, gated=True),
            "product gate_up 8B, few rows": product(8, 4096, 14336, gated=True),
            "product gate_up 0.6B, few rows": product(24, 1024, 3072, gated=True, bias=True),
            "product output 8B, few rows": product(32, 4096, 4096, may_split=True),
            "product gate_up 0.5B, tiles beside each other": product(256, 896, 4864, gated=True),
            "product gate_up 1.5B, few rows": product(16, 1536, 8960, gated=True),
            "product gate_up 4B, tiles beside each other": product(64, 2560, 9728, gated=True),
            "product gate_up 14B": product(64, 5120, 17408, gated=True),
            "product gate_up 8B, many rows": product(128, 4096, 14336, gated=True),
            "product down 0.5B": product(64, 4864, 896, may_split=True),
            "product down 0.6B": product(256, 3072, 1024, may_split=True),
            "product output 0.5B, added": product(128, 896, 896, added=True),
            "product output 0.5B, few rows, added": product(8, 896, 896, added=True),
            "product output 0.6B, added": product(256, 2048, 1024, added=True),
            "product gate_up 0.5B, scaled": product(128, 896, 4864, gated=True, parts=32),
            "product gate_up 0.5B, few rows, scaled": product(8, 896, 4864, gated=True, parts=16),
            "product gate_up 0.5B, tiles beside each other, scaled": product(
                256, 896, 4864, gated=True, parts=16
            ),
            "product gate_up 1.5B, few rows, scaled": product(16, 1536, 8960, gated=True, parts=32),
            "product gate_up 0.6B, scaled": product(64, 1024, 3072, gated=True, parts=32),
            "heads 0.5B": heads(64, 896, 14, 2, 64),
            "heads 0.5B, many rows": heads(256, 896, 14, 2, 64),
            "heads 0.6B": heads(128, 1024, 16, 8, 128, normed=True),
            "heads 0.5B, many rows, scaled": heads(256, 896, 14, 2, 64, parts=16),
            "heads 0.6B, scaled": heads(128, 1024, 16, 8, 128, normed=True, parts=32),
            "gated product, wide": gated_product(hopper_gated.WIDE),
            "gated product, narrow": gated_product(hopper_gated.NARROW),
            "rotate and store": rotate_and_store(16, 8, 128),
        },
        sys.stdout,
    )
