//! Published configurations parse; each contradiction is refused by name.

use super::*;

const TINY: &str = include_str!("../../testdata/k3-tiny-config.json");
const FIVE_B: &str = include_str!("../../testdata/k3-5b-config.json");
const K3: &str = include_str!("../../testdata/kimi-k3-config.json");

fn parse(text: &str) -> Result<K3Config, Error> {
    K3Config::parse(text, Path::new("config.json"))
}

/// The error when `change` is applied to the tiny model's configuration.
fn refusal(change: impl FnOnce(&mut Value)) -> String {
    let mut json: Value = serde_json::from_str(TINY).unwrap();
    change(&mut json);
    let text = parse(&json.to_string()).unwrap_err().to_string();
    assert!(text.starts_with("config.json: ") && !text.contains('\n'), "{text}");
    text
}

#[test]
fn the_release_has_its_dimensions() {
    let k3 = parse(K3).unwrap();
    assert_eq!(
        (k3.hidden_size, k3.num_hidden_layers, k3.vocab_size),
        (7168, 93, 163_840)
    );
    assert_eq!(
        (k3.kda_width(), k3.qk_head_dim(), k3.kv_cache_width()),
        (12_288, 192, 576)
    );
    assert_eq!(k3.shared_intermediate_size(), 6144);
    assert_eq!(
        (k3.bos_token_id, k3.eos_token_id, k3.pad_token_id),
        (163_584, 163_586, 163_839)
    );
    assert_eq!(k3.first_special_id(), 163_584);
    assert_eq!(k3.rms_norm_eps, 1e-5);
    let mla: Vec<usize> = (0..93).filter(|&layer| k3.is_mla(layer)).collect();
    assert_eq!(mla.len(), 24);
    assert!(mla.iter().all(|layer| (layer + 1) % 4 == 0 || *layer == 92));
    assert_eq!(k3.moe_layers(), 92);
    assert!(!k3.is_moe(0) && k3.is_moe(1) && k3.is_moe(92) && !k3.is_moe(93));
}

#[test]
fn absent_fields_get_their_published_values() {
    let config = parse(FIVE_B).unwrap();
    assert_eq!(config.moe_layer_freq, 1);
    assert_eq!(config.max_position_embeddings, 1 << 20);
    assert_eq!((config.bos_token_id, config.eos_token_id), (8192 - 256, 8192 - 254));
}

#[test]
fn special_ids_come_from_either_object() {
    let mut json: Value = serde_json::from_str(FIVE_B).unwrap();
    json["eos_token_id"] = json!(7);
    assert_eq!(parse(&json.to_string()).unwrap().eos_token_id, 7);
    json["text_config"]["eos_token_id"] = json!(8);
    assert_eq!(parse(&json.to_string()).unwrap().eos_token_id, 8);
}

#[test]
fn missing_fields_are_named() {
    for name in [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "routed_expert_hidden_size",
        "linear_attn_config",
        "hidden_act",
        "mla_use_nope",
        "num_experts",
        "attn_res_block_size",
    ] {
        let text = refusal(|json| drop(json["text_config"].as_object_mut().unwrap().remove(name)));
        assert!(
            text.starts_with(&format!("config.json: text_config.{name}: found nothing, expected ")),
            "{text}"
        );
    }
    let text = refusal(|json| drop(json.as_object_mut().unwrap().remove("text_config")));
    assert!(text.contains(" text_config: found nothing"), "{text}");
}

#[test]
fn unsupported_and_contradictory_values_are_named() {
    for (field, value) in [
        ("hidden_act", json!("silu")),
        ("mla_use_nope", json!(false)),
        ("mla_use_output_gate", json!(false)),
        ("latent_moe_use_norm", json!(false)),
        ("moe_router_activation_func", json!("softmax")),
        ("moe_renormalize", json!(false)),
        ("topk_method", json!("greedy")),
        ("num_expert_group", json!(8)),
        ("topk_group", json!(4)),
        ("num_nextn_predict_layers", json!(1)),
        ("tie_word_embeddings", json!(true)),
        ("num_key_value_heads", json!(2)),
        ("num_experts_per_token", json!(9)),
        ("num_experts_per_token", json!(0)),
        ("routed_expert_hidden_size", json!(80)),
        ("moe_intermediate_size", json!(100)),
        ("first_k_dense_replace", json!(14)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!("small")),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(1e30)),
        ("hidden_size", json!(1u64 << 40)),
        ("num_attention_heads", json!(1 << 23)),
        ("num_shared_experts", json!(1 << 20)),
        ("num_experts", json!(1 << 20)),
        ("vocab_size", json!(256)),
        ("bos_token_id", json!(512)),
    ] {
        let text = refusal(|json| {
            json["text_config"][field] = value.clone();
            if field == "num_attention_heads" {
                json["text_config"]["num_key_value_heads"] = value.clone();
            }
        });
        assert!(
            text.starts_with(&format!("config.json: text_config.{field}: found ")),
            "{field} {value}: {text}"
        );
    }
    let text = refusal(|json| json["model_type"] = json!("llama"));
    assert!(
        text.contains("model_type: found \"llama\", expected \"kimi_k3\""),
        "{text}"
    );
}

#[test]
fn quantisation_is_mxfp4_in_groups_of_32() {
    let weights = |json: &mut Value, name: &str, value: Value| {
        json["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"][name] = value;
    };
    let text = refusal(|json| weights(json, "group_size", json!(16)));
    assert!(
        text.contains("config_groups.group_0.weights.group_size: found 16, expected 32"),
        "{text}"
    );
    let text = refusal(|json| weights(json, "num_bits", json!(8)));
    assert!(text.contains("num_bits: found 8, expected 4"), "{text}");
    let text = refusal(|json| json["text_config"]["quantization_config"]["format"] = json!("int-quantized"));
    assert!(
        text.contains("text_config.quantization_config.format: found \"int-quantized\""),
        "{text}"
    );

    let mut json: Value = serde_json::from_str(TINY).unwrap();
    json["text_config"]
        .as_object_mut()
        .unwrap()
        .remove("quantization_config");
    parse(&json.to_string()).unwrap();
    json["quantization_config"] = json!({"quant_method": "fp8"});
    let text = parse(&json.to_string()).unwrap_err().to_string();
    assert!(
        text.contains(" quantization_config.quant_method: found \"fp8\""),
        "{text}"
    );
}

#[test]
fn layer_lists_cover_every_layer_once() {
    let lists = |full: Value, kda: Value| {
        refusal(|json| {
            let linear = &mut json["text_config"]["linear_attn_config"];
            (linear["full_attn_layers"], linear["kda_layers"]) = (full, kda);
        })
    };
    let kda = json!([1, 2, 3, 5, 6, 7, 9, 10, 11]);
    let text = lists(json!([4, 8, 12]), kda.clone());
    assert!(
        text.contains("linear_attn_config.kda_layers: found no layer 13"),
        "{text}"
    );
    let text = lists(json!([3, 4, 8, 12, 13]), kda.clone());
    assert!(
        text.contains("kda_layers: found layer 3, which full_attn_layers has too"),
        "{text}"
    );
    let text = lists(json!([0, 4, 8, 12, 13]), kda.clone());
    assert!(
        text.contains("full_attn_layers: found layer 0, expected layers from 1 to 13"),
        "{text}"
    );
    let text = lists(json!([4, 8, 12, 14]), kda.clone());
    assert!(text.contains("found layer 14"), "{text}");
    let text = lists(json!("4"), kda);
    assert!(
        text.contains("full_attn_layers: found \"4\", expected a list"),
        "{text}"
    );
}

#[test]
fn text_that_is_no_object_is_refused() {
    for text in ["", "{", "[1]", "null", "{} {}"] {
        assert!(matches!(parse(text), Err(Error::Json { .. })), "{text}");
    }
}

#[test]
fn unknown_fields_are_passed_over() {
    let mut json: Value = serde_json::from_str(TINY).unwrap();
    json["text_config"]["a_new_field"] = json!({"deep": [1, 2]});
    json["another"] = json!(null);
    assert_eq!(parse(&json.to_string()).unwrap(), parse(TINY).unwrap());
}
