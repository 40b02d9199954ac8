//! Input that is wrong: one line that says where, what was found, what was expected and what to do; status 1; no panic.

mod common;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use checkpoint::{Checkpoint, ExpertPart};
use common::{Folder, Golden, anabranch, error_line, run};
use serde_json::{Value, json};

/// Runs a prompt of three tokens and returns the error.
fn error_of(model: &Path) -> String {
    error_line(&run([
        "run",
        "--model",
        model.to_str().unwrap(),
        "--ids",
        "1,2,3",
        "--max-tokens",
        "2",
    ]))
}

fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
}

type Damage = fn(&Folder);

#[test]
fn damaged_folders() {
    let table: &[(&str, Damage, &[&str])] = &[
        (
            "truncated shard",
            |folder| {
                let len = fs::metadata(folder.shard(4)).unwrap().len();
                folder.edit_bytes(4, |bytes| bytes.truncate(len as usize - 1000));
            },
            &[
                "model-00004-of-000014.safetensors: found ",
                " bytes, expected ",
                "download",
            ],
        ),
        (
            "missing shard",
            |folder| fs::remove_file(folder.shard(9)).unwrap(),
            &[
                "model-00009-of-000014.safetensors: found no such file, expected a shard",
                "download it",
            ],
        ),
        (
            "wrong dtype",
            |folder| folder.edit_header(2, |header| tensor(header, "A_log")["dtype"] = json!("I32")),
            &[
                "model-00002-of-000014.safetensors: ",
                "A_log: found dtype I32, expected F32",
                "use the files",
            ],
        ),
        (
            "header length beyond the file",
            |folder| folder.edit_bytes(3, |bytes| bytes[..8].copy_from_slice(&90_000_000u64.to_le_bytes())),
            &[
                "model-00003-of-000014.safetensors: found ",
                "expected 90000008",
                "download",
            ],
        ),
        (
            "header length beyond belief",
            |folder| folder.edit_bytes(3, |bytes| bytes[..8].fill(0xFF)),
            &[
                "model-00003-of-000014.safetensors: found a header length of 18446744073709551615",
                "expected at most",
                "download",
            ],
        ),
        (
            "overlapping offsets",
            |folder| folder.edit_header(5, |header| shift(header, "experts.0.w2.weight_packed", -64)),
            &[
                "model-00005-of-000014.safetensors: ",
                "experts.0.w2.weight_packed: found ",
                "expected ",
                "download",
            ],
        ),
        (
            "offsets out of range",
            |folder| {
                folder.edit_header(6, |header| {
                    let last = header.values().filter_map(|t| t["data_offsets"][1].as_u64()).max();
                    for tensor in header.values_mut().filter(|t| t["data_offsets"][1].as_u64() == last) {
                        let grown = tensor["shape"][0].as_u64().unwrap() + 1000;
                        let row = (last.unwrap() - tensor["data_offsets"][0].as_u64().unwrap()) / (grown - 1000);
                        tensor["shape"][0] = json!(grown);
                        tensor["data_offsets"][1] = json!(last.unwrap() + 1000 * row);
                    }
                });
            },
            &["model-00006-of-000014.safetensors: ", "found ", "expected ", "; "],
        ),
        (
            "offsets beyond 2^63",
            |folder| {
                folder.edit_header(6, |header| tensor(header, "A_log")["data_offsets"][1] = json!(u64::MAX));
            },
            &[
                "model-00006-of-000014.safetensors: ",
                "A_log: found ",
                "expected ",
                "download",
            ],
        ),
        (
            "scale byte 255 in an expert that is used",
            |folder| {
                let checkpoint = Checkpoint::open(folder.path()).unwrap();
                for expert in 0..checkpoint.config().num_experts {
                    let place = checkpoint.expert(7, expert).unwrap();
                    let part = place.part(ExpertPart::W3Scale);
                    let at = place.extents()[part.extent].offset + part.offset + 5;
                    folder.edit_bytes(8, |bytes| bytes[at as usize] = 255);
                }
            },
            &[
                "model-00008-of-000014.safetensors: tensor language_model.model.layers.7.block_sparse_moe.experts.",
                ".w3.weight_scale: scale byte 255",
                "row 2, block 1, expected 0 to 254",
                "fetch it again",
            ],
        ),
        (
            "a config of another model",
            |folder| {
                let path = folder.path().join("config.json");
                let text = fs::read_to_string(&path).unwrap().replace("\"situ\"", "\"gelu\"");
                fs::write(path, text).unwrap();
            },
            &[
                "config.json: text_config.hidden_act: found ",
                "gelu",
                "expected ",
                "situ",
                "; use",
            ],
        ),
        (
            "no ranks",
            |folder| fs::remove_file(folder.path().join("tiktoken.model")).unwrap(),
            &["tiktoken.model", "; "],
        ),
    ];
    for (name, damage, parts) in table {
        let folder = Folder::new();
        damage(&folder);
        let error = error_of(folder.path());
        println!("{name}: {error}");
        assert_says(&error, parts);
    }
}

/// The header entry whose name ends so.
fn tensor<'a>(header: &'a mut serde_json::Map<String, Value>, suffix: &str) -> &'a mut Value {
    let found = header.iter_mut().find(|(name, _)| name.ends_with(suffix));
    found.unwrap_or_else(|| panic!("no tensor {suffix}")).1
}

fn shift(header: &mut serde_json::Map<String, Value>, suffix: &str, by: i64) {
    for offset in tensor(header, suffix)["data_offsets"].as_array_mut().unwrap() {
        *offset = json!(offset.as_i64().unwrap() + by);
    }
}

#[test]
fn folders_that_are_no_checkpoint() {
    let empty = tempfile::tempdir().unwrap();
    assert_says(
        &error_of(empty.path()),
        &[
            empty.path().to_str().unwrap(),
            "found neither config.json",
            "expected a checkpoint folder",
            "name the folder",
        ],
    );
    let absent = empty.path().join("absent");
    assert_says(&error_of(&absent), &["absent", "cannot", "check that the path exists"]);
}

#[test]
fn an_expert_that_is_not_used_may_be_damaged() {
    let folder = Folder::new();
    let args = [
        "run",
        "--model",
        folder.path().to_str().unwrap(),
        "--ids",
        "1",
        "--max-tokens",
        "1",
        "--json",
    ];
    let whole = common::json(&run(args))["ids"].clone();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (experts, used) = (
        checkpoint.config().num_experts,
        checkpoint.config().num_experts_per_token,
    );
    let harmless = (0..experts).filter(|&expert| {
        let place = checkpoint.expert(1, expert).unwrap();
        let part = place.part(ExpertPart::W1Scale);
        let at = (place.extents()[part.extent].offset + part.offset) as usize;
        let mut kept = 255;
        folder.edit_bytes(2, |bytes| std::mem::swap(&mut bytes[at], &mut kept));
        let output = run(args);
        folder.edit_bytes(2, |bytes| bytes[at] = kept);
        match output.status.success() {
            true => assert_eq!(common::json(&output)["ids"], whole),
            false => assert_says(
                &error_line(&output),
                &[&format!("layers.1.block_sparse_moe.experts.{expert}.w1.weight_scale")],
            ),
        }
        output.status.success()
    });
    assert_eq!(harmless.count(), experts - used);
}

#[test]
fn prompts_that_are_no_text() {
    let golden = Golden::read("k3_a");
    let with_stdin = |bytes: &[u8], more: &[&str]| {
        let mut child = anabranch(["run", "--model", golden.model(), "--prompt", "-"].iter().chain(more))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        child.wait_with_output().unwrap()
    };
    let error = error_line(&with_stdin(b"good \xFF bad", &[]));
    assert_says(
        &error,
        &["standard input: found byte 0xff at offset 5", "expected UTF-8", "iconv"],
    );
    let error = error_line(&with_stdin(b"", &["--raw"]));
    assert_says(
        &error,
        &[
            "prompt is empty: found 0 bytes",
            "expected at least 1",
            "give some text",
        ],
    );
    let error = error_line(&run(["run", "--model", golden.model(), "--prompt", "", "--raw"]));
    assert_says(&error, &["prompt is empty"]);
    let output = with_stdin("caf\u{E9}\n".as_bytes(), &["--raw", "--max-tokens", "1", "--json"]);
    let tokenizer = checkpoint::tokenizer::Tokenizer::load(&golden.dir).unwrap();
    let expected: Vec<u64> = tokenizer
        .encode_ordinary("caf\u{E9}\n")
        .into_iter()
        .map(u64::from)
        .collect();
    assert_eq!(common::numbers(&common::json(&output)["prompt_ids"]), expected);
}

#[test]
#[cfg(unix)]
fn arguments_that_are_no_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let golden = Golden::read("k3_a");
    let bad = OsStr::from_bytes(b"ab\xC3");
    let prompt = [
        OsStr::new("run"),
        "--model".as_ref(),
        golden.dir.as_os_str(),
        "--prompt".as_ref(),
    ];
    let error = error_line(&run(prompt.iter().copied().chain([bad])));
    assert_says(&error, &["--prompt: found byte 0xc3 at offset 2", "expected UTF-8"]);
    let system = ["x".as_ref(), "--system".as_ref(), bad];
    let error = error_line(&run(prompt.iter().copied().chain(system)));
    assert_says(&error, &["--system: found byte 0xc3 at offset 2"]);
}

#[test]
fn ids_and_lengths_out_of_range() {
    let golden = Golden::read("k3_a");
    let error = |more: &[&str]| error_line(&run(["run", "--model", golden.model()].iter().chain(more)));
    assert_says(
        &error(&["--ids", "5,544"]),
        &["544", "expected 0 to 543", "check the ids"],
    );
    assert_says(
        &error(&["--ids", "1,2,3", "--max-tokens", "8", "--context", "10"]),
        &[
            "3 tokens and --max-tokens 8 make 11",
            "expected at most 10",
            "raise --context",
        ],
    );
    assert_says(
        &error(&["--ids", "1,2,3", "--max-tokens", "1048576"]),
        &["make 1048579, expected at most 1048576", "max_position_embeddings"],
    );
    assert_says(
        &error(&["--ids", "1", "--context", "2000000"]),
        &["context of 2000000 tokens", "1048576", "ask for less"],
    );
}

#[test]
fn memory_that_is_too_small_names_the_number_that_would_do() {
    let folder = Folder::new();
    let with = |memory: &str| {
        let model = folder.path().to_str().unwrap();
        run([
            "run",
            "--model",
            model,
            "--ids",
            "1,2,3",
            "--max-tokens",
            "4",
            "--json",
            "--memory",
            memory,
        ])
    };
    let error = error_line(&with("1MB"));
    assert_says(
        &error,
        &[
            "memory budget of 1000000 bytes (977 KiB) is too small",
            "at least ",
            "raise --memory to ",
        ],
    );
    let number = error.split("raise --memory to ").nth(1).unwrap();
    let number: u64 = number
        .chars()
        .take_while(char::is_ascii_digit)
        .collect::<String>()
        .parse()
        .unwrap();
    error_line(&with(&(number - 1).to_string()));
    let least = common::json(&with(&number.to_string()));
    assert_eq!(least["ids"], common::json(&with("1GiB"))["ids"]);
    assert!(least["stats"]["peak_memory_bytes"].as_u64().unwrap() <= number);
}

/// As root, which may read everything, the program runs as nobody.
#[test]
#[cfg(unix)]
fn a_file_that_may_not_be_read() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    let folder = Folder::new();
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let program = folder.path().join("program");
    fs::copy(env!("CARGO_BIN_EXE_anabranch"), &program).unwrap();
    mode(folder.path(), 0o755);
    mode(&folder.shard(3), 0);
    let mut command = Command::new(program);
    command.args(["run", "--model", folder.path().to_str().unwrap(), "--ids", "1"]);
    if fs::metadata(folder.path()).unwrap().uid() == 0 {
        command.uid(65534).gid(65534);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return println!("skipped: cannot run as nobody: {error}"),
    };
    let error = error_line(&output);
    assert_says(
        &error,
        &[
            "model-00003-of-000014.safetensors: cannot open",
            "ermission denied",
            "check that",
        ],
    );
}

#[test]
fn places_that_cannot_be_written_to() {
    let golden = Golden::read("k3_a");
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("absent/x.npy");
    let error = error_line(&run([
        "logits",
        "--model",
        golden.model(),
        "--ids",
        "1",
        "--out",
        absent.to_str().unwrap(),
    ]));
    assert_says(
        &error,
        &["absent/x.npy", "cannot create", "check that the folder exists"],
    );

    let config = dir.path().join("config.json");
    fs::write(&config, common::TINY).unwrap();
    let synth = |config: &Path, out: &Path| {
        run([
            "synth",
            "--config",
            config.to_str().unwrap(),
            "--seed",
            "1",
            "--out",
            out.to_str().unwrap(),
        ])
    };
    assert_says(
        &error_line(&synth(&config, dir.path())),
        &["found config.json in the folder", "expected an empty or new one"],
    );
    assert_says(
        &error_line(&synth(&absent, &dir.path().join("new"))),
        &["absent/x.npy: cannot read", "check that"],
    );
    let odd = dir.path().join("odd.json");
    fs::write(&odd, "{").unwrap();
    assert_says(
        &error_line(&synth(&odd, &dir.path().join("new"))),
        &["odd.json: found ", "expected "],
    );
}

/// A file system of one megabyte, which only root can make.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk() {
    use std::process::Command;
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    fs::write(&config, common::TINY).unwrap();
    let disk = dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(&disk)
        .output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return println!("skipped: a small file system cannot be mounted here");
    }
    let out = disk.join("out");
    let output = run([
        "synth",
        "--config",
        config.to_str().unwrap(),
        "--seed",
        "1",
        "--out",
        out.to_str().unwrap(),
    ]);
    let left = fs::read_dir(&out).unwrap().count();
    let unmounted = Command::new("umount").arg(&disk).status().unwrap();
    let error = error_line(&output);
    assert_says(&error, &["out: found ", " bytes free, expected ", "free some space"]);
    assert_eq!(left, 0);
    assert!(unmounted.success());
}
