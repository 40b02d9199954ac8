//! Writing a random checkpoint in the published layout, for a configuration of any size.

pub(crate) mod fill;
pub(crate) mod plan;
mod vision;
mod vocabulary;

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::config::{Fields, K3Config, parse_json};
use crate::error::Error;
use crate::index::INDEX_FILE;
use crate::page_cache::forget_pages;
use fill::{Fill, tensor_key};
use plan::{Plan, ShardPlan, Tensor};
use vision::VisionConfig;

/// Changes whenever the same configuration and seed come to give other files.
pub const SYNTH_VERSION: u32 = 1;

/// Bytes made and written at a time, a multiple of eight.
const PIECE_BYTES: usize = 4 << 20;

/// How far the writing has come.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The file being written.
    pub file: &'a str,
    /// Bytes written to all shards so far (with holes: bytes laid out).
    pub bytes: u64,
    /// Bytes of all shards.
    pub total: u64,
    stop: &'a Cell<bool>,
}

impl Progress<'_> {
    /// Asks the writing to stop: it removes what it wrote and fails with [`Error::Stopped`].
    pub fn stop(&self) {
        self.stop.set(true);
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Number of shards.
    pub shards: usize,
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of all tensors, which is the index's `total_size`.
    pub tensor_bytes: u64,
    /// Bytes of all shards, headers included.
    pub file_bytes: u64,
}

/// Writes a random checkpoint with the configuration `config_json` into the folder `out`, which is new or empty.
///
/// Layout, names, order and headers are those of the release: for the release's own configuration every shard has
/// its published length. `config.json` is `config_json` as it is. The weights depend on `seed` and the tensors'
/// names alone and give finite, varied logits. With `sparse` the headers are true and the data are holes, so that
/// a model of any size can be opened and planned with on a small disk.
///
/// Each file is written under a `.partial` name, synced and renamed; the index and `config.json` come last. A failed
/// run removes the files that it wrote.
///
/// # Errors
///
/// The configuration is refused (as by [`K3Config::parse`], or for fewer than 512 ids), `out` is not empty, the
/// disk has too little space (checked before anything is written), or a write fails.
pub fn synthesize(
    config_json: &str,
    seed: u64,
    out: &Path,
    sparse: bool,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Summary, Error> {
    let plan = plan(config_json)?;
    let summary = measure(&plan);
    prepare(out)?;
    let small_files = small_files(&plan, config_json);
    let small_bytes: usize = small_files.iter().map(|(_, text)| text.len()).sum();
    let shard_bytes = if sparse {
        summary.file_bytes - summary.tensor_bytes
    } else {
        summary.file_bytes
    };
    check_space(out, shard_bytes + index_bytes(&plan) + small_bytes as u64)?;

    let mut run = Run {
        plan: &plan,
        seed,
        sparse,
        out,
        summary,
        bytes: 0,
        written: Vec::new(),
        progress,
    };
    run.write_all_or_nothing(&small_files)?;
    Ok(summary)
}

/// Reads the configuration; a path that stands for the text itself is enough for messages.
fn plan(config_json: &str) -> Result<Plan, Error> {
    let path = Path::new("config.json");
    let config = K3Config::parse(config_json, path)?;
    let json = parse_json(config_json, path)?;
    let root = Fields::root(path, &json)?;
    if config.vocab_size < vocabulary::MIN_VOCAB {
        let expected = format!("at least {}: every byte and the special tokens", vocabulary::MIN_VOCAB);
        return Err(root
            .object("text_config", "text_config")?
            .wrong("vocab_size", config.vocab_size, expected));
    }
    let vision = VisionConfig::parse(&root, config.hidden_size)?;
    Ok(Plan::new(config, vision))
}

/// Adds up the shards.
fn measure(plan: &Plan) -> Summary {
    let mut summary = Summary {
        shards: plan.shards(),
        tensors: 0,
        tensor_bytes: 0,
        file_bytes: 0,
    };
    for number in 0..plan.shards() {
        let shard = plan.shard(number);
        summary.tensors += shard.tensors.len() as u64;
        summary.tensor_bytes += shard.data_bytes;
        summary.file_bytes += shard.header.len() as u64 + shard.data_bytes;
    }
    summary
}

/// Makes the folder, or sees that it is empty.
fn prepare(out: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(out).map_err(|e| Error::io(out, "create the folder", e))?;
    let mut entries = std::fs::read_dir(out).map_err(|e| Error::io(out, "open", e))?;
    match entries.next() {
        None => Ok(()),
        Some(Err(e)) => Err(Error::io(out, "read", e)),
        Some(Ok(entry)) => Err(Error::TargetNotEmpty {
            path: out.to_owned(),
            found: entry.file_name().to_string_lossy().into_owned(),
        }),
    }
}

/// Compares the space on the disk of `out` with what is needed.
fn check_space(out: &Path, needed: u64) -> Result<(), Error> {
    let free = free_bytes(out)?;
    if free < needed {
        Err(Error::NoSpace {
            path: out.to_owned(),
            needed,
            free,
        })
    } else {
        Ok(())
    }
}

/// Bytes that an ordinary user may still write on the disk of `dir`.
fn free_bytes(dir: &Path) -> Result<u64, Error> {
    let stat = rustix::fs::statvfs(dir).map_err(|e| Error::io(dir, "ask for the free space", e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Every file but shards and index; `config.json`, which makes the folder a checkpoint, is last.
fn small_files(plan: &Plan, config_json: &str) -> [(&'static str, String); 4] {
    [
        ("generation_config.json", vocabulary::generation_config(&plan.config)),
        ("tokenizer_config.json", vocabulary::tokenizer_config(&plan.config)),
        ("tiktoken.model", vocabulary::tiktoken_model(&plan.config)),
        ("config.json", config_json.to_owned()),
    ]
}

/// An upper bound of the index's length.
fn index_bytes(plan: &Plan) -> u64 {
    let line = |tensor: &Tensor| tensor.name.len() as u64 + 64;
    (0..plan.shards())
        .map(|number| plan.shard(number).tensors.iter().map(line).sum::<u64>())
        .sum::<u64>()
        + 128
}

/// One writing of a checkpoint.
struct Run<'a> {
    plan: &'a Plan,
    seed: u64,
    sparse: bool,
    out: &'a Path,
    summary: Summary,
    /// Bytes of shards done.
    bytes: u64,
    /// Files that exist now.
    written: Vec<PathBuf>,
    progress: &'a mut dyn FnMut(Progress<'_>),
}

impl Run<'_> {
    fn write_all_or_nothing(&mut self, small_files: &[(&str, String)]) -> Result<(), Error> {
        let result = self.write_all(small_files);
        if result.is_err() {
            for path in &self.written {
                // The error that led here matters more than one from cleaning up.
                let _ = std::fs::remove_file(path);
            }
        }
        result
    }

    fn write_all(&mut self, small_files: &[(&str, String)]) -> Result<(), Error> {
        for number in 0..self.plan.shards() {
            let (name, shard) = (self.plan.file_name(number), self.plan.shard(number));
            self.publish(&name.clone(), |run, file, path| {
                run.write_shard(&name, &shard, file, path)
            })?;
        }
        for (name, text) in &small_files[..small_files.len() - 1] {
            self.publish(name, |run, file, path| run.write(file, path, text.as_bytes()))?;
        }
        self.publish(INDEX_FILE, |run, file, path| run.write_index(file, path))?;
        if let Some((name, text)) = small_files.last() {
            self.publish(name, |run, file, path| run.write(file, path, text.as_bytes()))?;
        }
        sync_dir(self.out)
    }

    /// Lets `write` fill `NAME.partial`, syncs it and gives it its name.
    fn publish(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut Self, &mut File, &Path) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (path, partial) = (self.out.join(name), self.out.join(format!("{name}.partial")));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&partial)
            .map_err(|e| Error::io(&partial, "create", e))?;
        self.written.push(partial.clone());
        write(self, &mut file, &partial)?;
        file.sync_all().map_err(|e| self.write_error(&partial, e))?;
        forget_pages(&file);
        std::fs::rename(&partial, &path).map_err(|e| Error::io(&partial, "rename", e))?;
        self.written.pop();
        self.written.push(path);
        Ok(())
    }

    fn write_shard(&mut self, name: &str, shard: &ShardPlan, file: &mut File, path: &Path) -> Result<(), Error> {
        self.write(file, path, &shard.header)?;
        if self.sparse {
            let len = shard.header.len() as u64 + shard.data_bytes;
            file.set_len(len).map_err(|e| self.write_error(path, e))?;
            return self.advance(path, name, len);
        }
        self.advance(path, name, shard.header.len() as u64)?;
        let mut piece = vec![0; PIECE_BYTES];
        let mut filled = 0;
        for tensor in &shard.tensors {
            let (fill, key) = (Fill::of(tensor, &self.plan.config), tensor_key(self.seed, &tensor.name));
            let mut offset = 0;
            while offset < tensor.bytes() {
                let room = (PIECE_BYTES - filled) / 8 * 8;
                let len = (tensor.bytes() - offset).min(room as u64) as usize;
                fill.write(key, offset, &mut piece[filled..filled + len]);
                filled += len;
                offset += len as u64;
                if filled + 8 > PIECE_BYTES {
                    self.write(file, path, &piece[..filled])?;
                    self.advance(path, name, filled as u64)?;
                    filled = 0;
                }
            }
        }
        self.write(file, path, &piece[..filled])?;
        self.advance(path, name, filled as u64)
    }

    fn write_index(&mut self, file: &mut File, path: &Path) -> Result<(), Error> {
        let mut index = BufWriter::with_capacity(PIECE_BYTES, file);
        let mut lines = || -> std::io::Result<()> {
            let total = self.summary.tensor_bytes;
            write!(
                index,
                "{{\n  \"metadata\": {{\n    \"total_size\": {total}\n  }},\n  \"weight_map\": {{"
            )?;
            let mut comma = "";
            for number in 0..self.plan.shards() {
                let file = self.plan.file_name(number);
                for tensor in &self.plan.shard(number).tensors {
                    write!(index, "{comma}\n    \"{}\": \"{file}\"", tensor.name)?;
                    comma = ",";
                }
            }
            index.write_all(b"\n  }\n}\n")?;
            index.flush()
        };
        lines().map_err(|e| self.write_error(path, e))
    }

    fn write(&self, file: &mut impl Write, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        file.write_all(bytes).map_err(|e| self.write_error(path, e))
    }

    /// A failed write; a full disk becomes the error that says how much is needed.
    fn write_error(&self, path: &Path, error: std::io::Error) -> Error {
        if error.kind() != ErrorKind::StorageFull {
            return Error::io(path, "write", error);
        }
        let needed = self.summary.file_bytes - self.bytes;
        Error::NoSpace {
            path: path.to_owned(),
            needed,
            free: free_bytes(self.out).unwrap_or(0),
        }
    }

    fn advance(&mut self, path: &Path, file: &str, bytes: u64) -> Result<(), Error> {
        self.bytes += bytes;
        let stop = Cell::new(false);
        (self.progress)(Progress {
            file,
            bytes: self.bytes,
            total: self.summary.file_bytes,
            stop: &stop,
        });
        match stop.get() {
            true => Err(Error::Stopped { path: path.to_owned() }),
            false => Ok(()),
        }
    }
}

/// Makes the new names durable.
fn sync_dir(dir: &Path) -> Result<(), Error> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| Error::io(dir, "sync", e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const TINY: &str = include_str!("../testdata/k3-tiny-config.json");

    /// `/dev/full` refuses every write as a full disk does.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_disk_that_fills_up_is_named_with_both_numbers() {
        let plan = plan(TINY).unwrap();
        let summary = measure(&plan);
        let out = tempfile::tempdir().unwrap();
        let mut file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut run = Run {
            plan: &plan,
            seed: 1,
            sparse: false,
            out: out.path(),
            summary,
            bytes: 0,
            written: Vec::new(),
            progress: &mut |_| (),
        };
        let shard = plan.shard(3);
        let error = run
            .write_shard("shard", &shard, &mut file, Path::new("shard"))
            .unwrap_err();
        assert!(
            matches!(error, Error::NoSpace { needed, .. } if needed == summary.file_bytes),
            "{error}"
        );
        let error = run.write_index(&mut file, Path::new("index")).unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert!(error.to_string().starts_with("index: found "), "{error}");
    }

    #[test]
    fn what_a_failed_run_wrote_is_removed() {
        let plan = plan(TINY).unwrap();
        let out = tempfile::tempdir().unwrap();
        let mut run = Run {
            plan: &plan,
            seed: 1,
            sparse: true,
            out: out.path(),
            summary: measure(&plan),
            bytes: 0,
            written: Vec::new(),
            progress: &mut |_| (),
        };
        // The name of the last file is taken, so that the run fails after all others.
        std::fs::create_dir(out.path().join("config.json")).unwrap();
        let files = small_files(&plan, TINY);
        let error = run.write_all_or_nothing(&files).unwrap_err();
        assert!(matches!(error, Error::Io { action: "rename", .. }), "{error}");
        assert_eq!(run.written.len(), plan.shards() + 5);
        let left: Vec<_> = std::fs::read_dir(out.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left, ["config.json"]);
    }

    #[test]
    fn a_run_that_is_told_to_stop_leaves_nothing() {
        let out = tempfile::tempdir().unwrap();
        let mut calls = 0;
        let error = synthesize(TINY, 1, out.path(), false, &mut |progress| {
            calls += 1;
            if calls == 5 {
                progress.stop();
            }
        })
        .unwrap_err();
        assert!(matches!(error, Error::Stopped { .. }), "{error}");
        assert_eq!(calls, 5);
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_vocabulary_without_every_byte_is_refused() {
        let mut json: Value = serde_json::from_str(TINY).unwrap();
        json["text_config"]["vocab_size"] = 511.into();
        for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            json["text_config"][name] = 1.into();
        }
        let error = plan(&json.to_string()).err().unwrap().to_string();
        assert!(
            error.contains("text_config.vocab_size: found 511, expected at least 512"),
            "{error}"
        );
    }
}
