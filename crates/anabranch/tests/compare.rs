//! `anabranch compare`: nothing where nothing differs, and what int8 and bf16 latents do to the demo model.

mod common;

use std::path::Path;

use common::{json, run, stderr, stdout};
use serde_json::Value;

fn demo(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo").join(name);
    path.to_str().unwrap().to_owned()
}

fn compared(more: &[&str]) -> Value {
    json(&run([&["compare", "--json"], more].concat()))
}

fn number(value: &Value, path: &str) -> f64 {
    value
        .pointer(path)
        .and_then(Value::as_f64)
        .unwrap_or_else(|| panic!("{path} of {value}"))
}

#[test]
fn the_same_settings_are_exactly_the_same() {
    let found = compared(&["--trunk", "bf16"]);
    for path in [
        "/logits/largest_difference",
        "/logits/rms_difference",
        "/logits/divergence",
        "/loss/difference",
    ] {
        assert_eq!(number(&found, path), 0.0, "{path}");
    }
    for path in [
        "/logits/same_most_likely",
        "/routes/same_sets",
        "/routes/same_experts",
        "/loss/perplexity_ratio",
    ] {
        assert_eq!(number(&found, path), 1.0, "{path}");
    }
    assert_eq!(found["routes"]["first_layer_that_differs"], Value::Null);
    assert_eq!(
        (&found["sides"][0], &found["sides"][1]),
        (&found["sides"][1], &found["sides"][0])
    );
    assert_eq!(number(&found, "/loss/tokens") + 1.0, number(&found, "/tokens"));
}

#[test]
fn the_loss_is_the_one_that_the_training_code_has() {
    let file = demo("heldout.json");
    let text: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let more = ["--ids-file", &file, "--trunk-folder", folder.path().to_str().unwrap()];
    let found = compared(&more);
    let want = text["loss"].as_f64().unwrap();
    let exact = number(&found, "/sides/0/loss");
    assert!((exact / want - 1.0).abs() < 1e-6, "{exact} for {want}");
    assert_eq!(found["sides"][0]["trunk"], "bf16");
    assert_eq!(found["sides"][1]["trunk"], "int8, not weight-exact");
    assert!(number(&found, "/sides/1/trunk_bytes") < 0.7 * number(&found, "/sides/0/trunk_bytes"));
    // What rounding to 8 bits does to a trained model: little, but not nothing.
    let difference = number(&found, "/loss/difference");
    assert!(difference != 0.0 && difference.abs() < 0.02, "{difference}");
    let difference_of_sides = number(&found, "/sides/1/loss") - exact;
    assert!((difference - difference_of_sides).abs() < 1e-12);
    for (path, least) in [
        ("/logits/same_most_likely", 0.95),
        ("/routes/same_sets", 0.7),
        ("/routes/same_experts", 0.9),
    ] {
        let share = number(&found, path);
        assert!(share > least && share < 1.0, "{path}: {share}");
    }
    let divergence = number(&found, "/logits/divergence");
    assert!(divergence > 0.0 && divergence < 0.02, "{divergence}");
    // It does not depend on how the texts are cut into passes, nor on threads.
    let other = compared(&[&more[..], &["--memory", "100MiB", "--threads", "1"]].concat());
    assert_eq!(other, found);
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        1,
        "the trunk alone is left"
    );
}

#[test]
fn latents_are_compared_by_themselves_or_together() {
    let prompt = ["--prompt", "The captain looked out over the grey water and", "--raw"];
    let kv = compared(&[&prompt[..], &["--kv", "bf16"]].concat());
    assert_eq!(
        (&kv["sides"][1]["trunk"], &kv["sides"][1]["kv"]),
        (&"bf16".into(), &"bf16".into())
    );
    let both = run([&["compare"], &prompt[..], &["--kv", "bf16", "--trunk", "int8"]].concat());
    let text = stdout(&both);
    for part in [
        "trunk bf16; latents f32",
        "trunk int8, not weight-exact; latents bf16",
        "| layer |",
        "loss: ",
        "routes: ",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    assert!(stderr(&both).contains("not weight-exact"), "{}", stderr(&both));
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let output = run(["compare", "--raw"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let output = run(["compare", "--prompt", "x", "--ids-file", "y"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let line = common::error_line(&run(["compare", "--ids-file", "/none"]));
    assert!(line.contains("/none"), "{line}");
}
