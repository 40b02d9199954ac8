"""Write and read a model in the publisher's layout: config.json, one safetensors shard a layer, tiktoken.model.

`save(w, c, out, tiktoken_path)` rounds the trunk to bf16 and the experts to MXFP4. `load(path)` gives (weights,
Config) back, with experts expanded to f32, for `k3.hidden_states(..., quantised=True)`.
"""
import glob
import json
import os
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import mxfp4
import tokenizer as tk
from k3 import F32_SUFFIXES, Config

PREFIX = "language_model."
PARTS = ("w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale", "w3.weight_packed",
         "w3.weight_scale")             # byte order of an expert in its shard


def config_json(c):
    eos = {"bos_token_id": tk.BASE, "eos_token_id": tk.END, "pad_token_id": tk.PAD}
    auto = lambda kinds: {k: f"{module}.{name}" for k, (module, name) in kinds.items()}
    text = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
        "auto_map": auto({"AutoConfig": ("configuration_kimi_k3", "KimiLinearConfig"),
                          "AutoModel": ("modeling_kimi_linear", "KimiLinearModel"),
                          "AutoModelForCausalLM": ("modeling_kimi_linear", "KimiLinearForCausalLM")}),
        **eos,
        "activation_situ_beta": c.situ_beta, "activation_situ_linear_beta": c.situ_linear_beta,
        "attn_res_block_size": c.block, "first_k_dense_replace": 1, "hidden_act": "situ", "hidden_size": c.hidden,
        "initializer_range": 0.02, "intermediate_size": c.inter, "kv_lora_rank": c.kv_lora,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": list(c.full_attn),
            "kda_layers": [i for i in range(1, c.layers + 1) if i not in c.full_attn],
            "gate_lower_bound": -5.0, "head_dim": c.kda_dim, "num_heads": c.kda_heads,
            "short_conv_kernel_size": c.conv, "use_full_rank_gate": True},
        "max_position_embeddings": 1048576, "mla_use_nope": True, "mla_use_output_gate": True,
        "moe_intermediate_size": c.moe_inter, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": c.heads, "num_expert_group": 1,
        "num_experts": c.experts, "num_experts_per_token": c.top_k, "num_hidden_layers": c.layers,
        "num_key_value_heads": c.heads, "num_nextn_predict_layers": 0, "num_shared_experts": c.shared,
        "q_lora_rank": c.q_lora, "qk_nope_head_dim": c.nope, "qk_rope_head_dim": c.rope,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None,
            "config_groups": {"group_0": {
                "targets": ["Linear"], "format": "mxfp4-pack-quantized", "input_activations": None,
                "output_activations": None,
                "weights": {"num_bits": 4, "type": "float", "group_size": mxfp4.GROUP, "strategy": "group",
                            "symmetric": True, "observer": "minmax", "observer_kwargs": {},
                            "scale_dtype": "torch.uint8", "dynamic": False, "actorder": None,
                            "block_structure": None, "zp_dtype": None}}},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                       "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"]},
        "rms_norm_eps": c.eps, "routed_expert_hidden_size": c.latent, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "4.56.2",
        "use_cache": True, "use_grouped_topk": True, "v_head_dim": c.v_dim, "vocab_size": c.vocab,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "auto_map": auto({"AutoConfig": ("configuration_kimi_k3", "KimiK3Config"),
                          "AutoModel": ("modeling_kimi_k3", "KimiK3ForConditionalGeneration"),
                          "AutoModelForCausalLM": ("modeling_kimi_k3", "KimiK3ForConditionalGeneration")}),
        **eos,
        "ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": tk.BASE + 21, "tie_word_embeddings": False, "text_config": text,
    }


def config_from_json(path):
    t = json.load(open(path))["text_config"]
    la = t["linear_attn_config"]
    return Config(
        vocab=t["vocab_size"], hidden=t["hidden_size"], layers=t["num_hidden_layers"],
        full_attn=tuple(la["full_attn_layers"]), block=t["attn_res_block_size"], kda_heads=la["num_heads"],
        kda_dim=la["head_dim"], conv=la["short_conv_kernel_size"], heads=t["num_attention_heads"],
        nope=t["qk_nope_head_dim"], rope=t["qk_rope_head_dim"], v_dim=t["v_head_dim"], q_lora=t["q_lora_rank"],
        kv_lora=t["kv_lora_rank"], inter=t["intermediate_size"], experts=t["num_experts"],
        top_k=t["num_experts_per_token"], latent=t["routed_expert_hidden_size"], moe_inter=t["moe_intermediate_size"],
        shared=t["num_shared_experts"], situ_beta=t["activation_situ_beta"],
        situ_linear_beta=t["activation_situ_linear_beta"], eps=t["rms_norm_eps"])


def _shards(w, c):
    """Tensors of each shard, names without the prefix: one shard a layer, then the rest."""
    shards = [{} for _ in range(c.layers + 1)]
    for name, x in w.items():
        x = x.detach().cpu()
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else c.layers
        shard = shards[layer]
        stem, _, part = name.rpartition(".experts.")
        if stem:
            for e in range(c.experts):
                shard[f"{stem}.experts.{e}.{part}.weight_packed"], shard[f"{stem}.experts.{e}.{part}.weight_scale"] = \
                    mxfp4.pack(x[e].float())
        elif name.endswith("A_log"):                        # stored as long as a head is wide; the tail means nothing
            shard[name] = torch.zeros(c.kda_dim)
            shard[name][:c.kda_heads] = x
        else:
            shard[name] = x.float() if name.endswith(F32_SUFFIXES) else x.to(torch.bfloat16)
    return shards


def save(w, c, out, tiktoken_path):
    """Returns (bytes of all files, parameters)."""
    os.makedirs(out, exist_ok=True)
    for old in glob.glob(f"{out}/*"):
        os.remove(old)
    dump = lambda name, value: json.dump(value, open(f"{out}/{name}", "w"), indent=1)
    shards = _shards(w, c)
    where, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors"
        tensors = {PREFIX + k: x.contiguous() for k, x in shard.items()}
        save_file(tensors, f"{out}/{file}", metadata={"format": "pt"})
        os.chmod(f"{out}/{file}", 0o644)
        where.update(dict.fromkeys(sorted(tensors), file))
        total += sum(x.numel() * x.element_size() for x in tensors.values())
        check_expert_order(f"{out}/{file}")
    json.dump({"metadata": {"total_size": total}, "weight_map": where},
              open(f"{out}/model.safetensors.index.json", "w"), separators=(",", ":"))
    dump("config.json", config_json(c))
    dump("generation_config.json", {"max_length": 1048576, "eos_token_id": tk.END})
    dump("tokenizer_config.json", {
        "added_tokens_decoder": {str(tk.BASE + i): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": i not in tk.STRUCTURAL} for i, text in tk.SPECIALS.items()},
        "additional_special_tokens": [tk.SPECIALS[i] for i in (2, 3, 4, 5)],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "model_max_length": 1000000000000000019884624838656, "tokenizer_class": "TikTokenTokenizer"})
    shutil.copy(tiktoken_path, f"{out}/tiktoken.model")
    size = sum(os.path.getsize(f) for f in glob.glob(f"{out}/*"))
    return size, sum(x.numel() for x in w.values())


def check_expert_order(path):
    """Each expert's six tensors lie back to back in the order of PARTS."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    header.pop("__metadata__", None)
    for stem in {k.rsplit(".w1.", 1)[0] for k in header if ".w1." in k}:
        spans = [header[f"{stem}.{part}"]["data_offsets"] for part in PARTS]
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:])), f"{path}: {stem} is not contiguous"


def load(path):
    c = config_from_json(f"{path}/config.json")
    raw = {}
    for file in sorted(glob.glob(f"{path}/*.safetensors")):
        with safe_open(file, "pt") as f:
            for k in f.keys():
                raw[k.removeprefix(PREFIX)] = f.get_tensor(k)
    w = {}
    for k, x in raw.items():
        if ".experts." not in k:
            w[k] = x.float()
        elif ".experts.0." in k and k.endswith("_packed"):
            stem, part = k.removesuffix(".weight_packed").split(".experts.0.")
            name = f"{stem}.experts.{{}}.{part}.weight_"
            w[f"{stem}.experts.{part}"] = torch.stack([mxfp4.unpack(raw[name.format(e) + "packed"],
                                                                    raw[name.format(e) + "scale"])
                                                       for e in range(c.experts)])
    for k in w:
        if k.endswith("A_log"):
            w[k] = w[k][:c.kda_heads]
    return w, c
