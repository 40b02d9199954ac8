//! Several drives: packs, layouts, and what is told about reads. Folders on one device are one drive, which is all that is needed here.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Golden, error_line, json, numbers, run, stderr, stdout};
use serde_json::Value;

/// The golden model's first layer with experts.
const LAYER: u32 = 1;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn layers(golden: &Golden) -> Vec<u64> {
    let config: Value = serde_json::from_slice(&fs::read(golden.dir.join("config.json")).unwrap()).unwrap();
    let layers = config["text_config"]["num_hidden_layers"].as_u64().unwrap();
    (LAYER.into()..layers).collect()
}

/// A folder with the golden model cut into two packs a layer, on drives `a` and `b`, and the layout that names them alone.
fn packed(golden: &Golden) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let mut plan = String::new();
    for layer in layers(golden) {
        plan += &format!("{{\"drive\": \"a\", \"layer\": {layer}, \"bytes\": [0, 2048]}}\n");
        plan += &format!("{{\"drive\": \"b\", \"layer\": {layer}}}\n");
    }
    for drive in ["a", "b"] {
        fs::create_dir(folder.path().join(drive)).unwrap();
    }
    fs::write(folder.path().join("plan.jsonl"), plan).unwrap();
    let layout = folder.path().join("layout.json");
    let drives = r#"{"version": 1, "model_folder": false, "drives": [{"path": "a", "note": "slot 1"}, {"path": "b"}]}"#;
    fs::write(&layout, drives).unwrap();
    (folder, layout)
}

#[test]
fn packs_are_placed_verified_and_answer_as_the_shards_do() {
    let golden = Golden::read("k3_a");
    let (folder, layout) = packed(&golden);
    let plan = folder.path().join("plan.jsonl");
    let place = [
        "place",
        "--model",
        golden.model(),
        "--plan",
        text(&plan),
        "--only-packs",
    ];
    let placed = run(place);
    assert!(placed.status.success(), "{}", stderr(&placed));
    let packs = 2 * layers(&golden).len();
    assert!(
        stderr(&placed).contains(&format!("{packs} packs written and verified")),
        "{}",
        stderr(&placed)
    );
    let again = run(place);
    assert!(
        stderr(&again).contains(&format!("{packs} were there already")),
        "{}",
        stderr(&again)
    );

    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let sound = run(["verify", text(&a), text(&b)]);
    assert!(sound.status.success(), "{}", stderr(&sound));
    let ids = golden.ids();
    let tokens = golden.generated.len().to_string();
    let answer = |drives: &[&str]| {
        let usual = [
            "run",
            "--model",
            golden.model(),
            "--ids",
            &ids,
            "--max-tokens",
            &tokens,
            "--json",
        ];
        json(&run([&usual[..], drives].concat()))
    };
    for drives in [
        &["--layout", text(&layout)][..],
        &["--drive", text(&b)],
        &["--drive", text(&a), "--drive", text(&b)],
    ] {
        let answer = answer(drives);
        assert_eq!(numbers(&answer["ids"]), golden.generated);
        let stats = &answer["stats"];
        let bytes = |name: &str| stats[name].as_u64().unwrap();
        assert_eq!(
            bytes("expert_bytes_read") + bytes("expert_bytes_cached"),
            bytes("expert_bytes_needed")
        );
    }

    let pack = a.read_dir().unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&pack).unwrap();
    *bytes.last_mut().unwrap() ^= 0;
    let middle = bytes.len() - 4096;
    bytes[middle + 1000] ^= 1;
    fs::write(&pack, bytes).unwrap();
    let damaged = error_line(&{
        let mut output = run(["verify", text(&a)]);
        // The damaged chunk is named in front of the error.
        let all = stderr(&output);
        assert!(
            all.lines()
                .any(|line| line.starts_with(text(&pack)) && line.contains("expert ")),
            "{all}"
        );
        output.stderr = all.lines().last().unwrap().as_bytes().to_vec();
        output
    });
    assert!(
        damaged.contains("found 1 of") && damaged.contains("place them again"),
        "{damaged}"
    );
}

#[test]
fn mistakes_with_drives_are_one_line() {
    let golden = Golden::read("k3_a");
    let folder = tempfile::tempdir().unwrap();
    let empty = text(folder.path()).to_owned();
    let missing = text(&folder.path().join("none")).to_owned();
    let ask = ["run", "--model", golden.model(), "--ids", "3", "--max-tokens", "1"];
    for (args, parts) in [
        (
            &["--drive", &empty][..],
            &["found neither a shard of this model nor a pack"][..],
        ),
        (&["--drive", &missing], &["none", "check that"]),
        (&["--layout", &missing], &["none", "cannot read"]),
    ] {
        let line = error_line(&run([&ask[..], args].concat()));
        parts
            .iter()
            .for_each(|part| assert!(line.contains(part), "{part:?} is missing: {line}"));
    }
    let line = error_line(&run(["verify", &empty]));
    assert!(line.contains("found no pack"), "{line}");
    let line = error_line(&run(["place", "--model", golden.model(), "--plan", &missing]));
    assert!(line.contains("cannot read"), "{line}");
    let line = error_line(&run(["trace", "export", &missing]));
    assert!(line.contains("cannot read the events"), "{line}");
    let both = run([&ask[..], &["--drive", "a", "--layout", "b"]].concat());
    assert_eq!(both.status.code(), Some(2), "{}", stderr(&both));
}

#[test]
fn drives_are_described() {
    let golden = Golden::read("k3_a");
    let found = json(&run(["drives", golden.model(), "--json"]));
    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!(found[0]["folders"][0], golden.model());
    let shown = run(["drives", golden.model()]);
    assert!(shown.status.success(), "{}", stderr(&shown));
    assert!(stdout(&shown).contains("file system"), "{}", stdout(&shown));
    let line = error_line(&run(["drives", "/nonexistent"]));
    assert!(line.contains("/nonexistent"), "{line}");
}

#[test]
fn events_add_up_to_the_account_and_become_a_trace() {
    let golden = Golden::read("k3_a");
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("reads.jsonl");
    let answer = json(&run([
        "run",
        "--model",
        golden.model(),
        "--ids",
        &golden.ids(),
        "--max-tokens",
        "4",
        "--json",
        "--cache",
        "0",
        "--stats",
        "--events",
        text(&events),
    ]));
    let lines = fs::read_to_string(&events).unwrap();
    let records: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sum = |name: &str| records.iter().map(|record| record[name].as_u64().unwrap()).sum::<u64>();
    let reads = &answer["stats"]["reads"];
    let account = &reads["account"];
    assert_eq!(sum("device_bytes"), account["device"].as_u64().unwrap());
    assert_eq!(account["needed"], account["device"]);
    assert_eq!(sum("bytes"), answer["stats"]["expert_bytes_needed"].as_u64().unwrap());
    assert_eq!(reads["drives"][0]["reads"].as_u64().unwrap(), records.len() as u64);
    // A pass for the prompt and for each token but the last, a barrier for each layer with experts.
    let barriers = layers(&golden).len() as u64 * 4;
    assert_eq!(reads["barriers"]["count"], barriers);

    let exported = run(["trace", "export", text(&events)]);
    assert!(exported.status.success(), "{}", stderr(&exported));
    let trace: Value = serde_json::from_slice(&fs::read(folder.path().join("reads.trace.json")).unwrap()).unwrap();
    let spans = |track: u64| {
        let of_track = |event: &&Value| event["ph"] == "X" && event["pid"] == track;
        trace["traceEvents"].as_array().unwrap().iter().filter(of_track).count()
    };
    assert_eq!((spans(0) as u64, spans(1)), (barriers, records.len()));
    fs::write(&events, "{}\n").unwrap();
    let line = error_line(&run(["trace", "export", text(&events)]));
    assert!(line.contains("line 1"), "{line}");
}
