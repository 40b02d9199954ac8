//! Memory stays within what is given, each needed byte is read once, and nothing of a shard stays in the page cache.
//!
//! By default on a model of 0.2 GB with experts of real size. With `ANABRANCH_LARGE_DIR` set to a folder with 24 GB of
//! room (`make large`) on one of 22 GB, which is made there at first use.
#![cfg(target_os = "linux")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// `--memory` for both models. The smaller one must be told to use little.
const GIB: u64 = 1 << 30;

/// Pages of the file that are in the page cache.
fn cached_pages(path: &Path) -> usize {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    if len == 0 {
        return 0;
    }
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: a read-only mapping of the file's length, unmapped below; mincore writes one byte for each of its pages.
    let asked = unsafe {
        let map = libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(map, libc::MAP_FAILED);
        let asked = libc::mincore(map, len, pages.as_mut_ptr());
        libc::munmap(map, len);
        asked
    };
    assert_eq!(asked, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

fn shards(model: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect()
}

fn synthesize(config: &str, model: &Path) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), config).unwrap();
    let (config, out) = (file.path().to_str().unwrap(), model.to_str().unwrap());
    let made = common::run(["synth", "--config", config, "--seed", "1", "--out", out]);
    assert!(made.status.success(), "{}", common::stderr(&made));
}

fn check(model: &Path, memory: u64, tokens: &str) {
    let (path, memory_text) = (model.to_str().unwrap(), memory.to_string());
    let direct = common::run([
        "run",
        "--model",
        path,
        "--raw",
        "--prompt",
        "The river divides and joins again",
        "--max-tokens",
        tokens,
        "--memory",
        &memory_text,
        "--json",
    ]);
    let stats = &common::json(&direct)["stats"];
    let number = |name: &str| stats[name].as_u64().unwrap();
    println!("memory {memory}, peak {}, stats {stats}", number("peak_memory_bytes"));
    assert!(number("peak_memory_bytes") as f64 <= 1.05 * memory as f64, "{stats}");
    assert!(number("expert_bytes_needed") > 0);
    assert_eq!(
        number("expert_bytes_read") + number("expert_bytes_cached"),
        number("expert_bytes_needed")
    );
    assert!(number("device_bytes") >= number("expert_bytes_read"));
    if common::stderr(&direct).contains("direct reads are refused") {
        println!("skipped: this file system refuses direct reads, so the page cache was not looked at");
        return;
    }
    for shard in shards(model) {
        assert_eq!(cached_pages(&shard), 0, "{}", shard.display());
    }
}

/// The bench's configuration with fewer layers and experts, which keep their real size.
fn smaller(config: &str) -> String {
    let mut config: Value = serde_json::from_str(config).unwrap();
    let text = &mut config["text_config"];
    text["num_hidden_layers"] = 3.into();
    text["num_experts"] = 6.into();
    text["num_experts_per_token"] = 2.into();
    text["hidden_size"] = 128.into();
    text["vocab_size"] = 1024.into();
    text["linear_attn_config"]["full_attn_layers"] = serde_json::json!([3]);
    text["linear_attn_config"]["kda_layers"] = serde_json::json!([1, 2]);
    config.to_string()
}

#[test]
fn memory_reads_and_the_page_cache() {
    let config = include_str!("../../../bench/configs/real-experts.json");
    match std::env::var_os("ANABRANCH_LARGE_DIR") {
        Some(dir) => {
            let model = Path::new(&dir).join("k3-real-experts");
            if !model.join("config.json").exists() {
                synthesize(config, &model);
            }
            check(&model, 2 * GIB, "8");
        }
        None => {
            // Beside the build, not in a temporary folder, which may be in memory and refuse direct reads.
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let model = dir.path().join("model");
            synthesize(&smaller(config), &model);
            check(&model, GIB / 4, "4");
        }
    }
}
