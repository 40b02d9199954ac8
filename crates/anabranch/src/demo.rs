//! The model when none is named: the trained demo model, which ships inside the program and is unpacked at first use into
//! the user's folder of cached files, so that it is streamed from disk like any other.

use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;

use crate::error::Error;
use crate::output;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../demo/model/", $name)))),*]
    };
}

/// The files of `demo/model`.
const FILES: &[(&str, &[u8])] = files![
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "model.safetensors.index.json",
    "model-00001-of-000014.safetensors",
    "model-00002-of-000014.safetensors",
    "model-00003-of-000014.safetensors",
    "model-00004-of-000014.safetensors",
    "model-00005-of-000014.safetensors",
    "model-00006-of-000014.safetensors",
    "model-00007-of-000014.safetensors",
    "model-00008-of-000014.safetensors",
    "model-00009-of-000014.safetensors",
    "model-00010-of-000014.safetensors",
    "model-00011-of-000014.safetensors",
    "model-00012-of-000014.safetensors",
    "model-00013-of-000014.safetensors",
    "model-00014-of-000014.safetensors",
];

/// The demo model's folder, after unpacking it if it is not there or not whole.
pub fn folder(cache: Option<&Path>) -> Result<PathBuf, Error> {
    let parent = cache.ok_or(Error::NoCache)?.join("anabranch");
    let dir = parent.join(format!("demo-{:016x}", fingerprint(FILES)));
    output::note(format_args!(
        "no --model was given: this is the demo model of 25 M parameters, which knows little ({})",
        dir.display()
    ));
    if Checkpoint::open(&dir).is_err() {
        unpack(&dir)?;
    }
    Ok(dir)
}

/// Writes the files beside `dir` and moves them there.
fn unpack(dir: &Path) -> Result<(), Error> {
    let partial = dir.with_extension(format!("{}.partial", std::process::id()));
    // Left behind by a killed process that had the same number.
    let _ = std::fs::remove_dir_all(&partial);
    let written = write(&partial).and_then(|()| {
        // One that is damaged gives way. So does a whole one that another process finished just now, for an equal one.
        let _ = std::fs::remove_dir_all(dir);
        std::fs::rename(&partial, dir).map_err(|e| Error::file(dir, "create", e))
    });
    match written {
        // Another process may have been faster.
        Err(error) if Checkpoint::open(dir).is_err() => {
            let _ = std::fs::remove_dir_all(&partial);
            Err(error)
        }
        _ => {
            let _ = std::fs::remove_dir_all(&partial);
            Ok(())
        }
    }
}

fn write(folder: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(folder).map_err(|e| Error::file(folder, "create", e))?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|e| Error::file(&path, "write", e))?;
    }
    Ok(())
}

/// Tells one version of the files from the next: FNV-1a (Fowler, Noll, Vo) over 8 bytes at a time.
fn fingerprint(files: &[(&str, &[u8])]) -> u64 {
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(5);
    files.iter().fold(0xcbf2_9ce4_8422_2325, |hash, (_, bytes)| {
        let (words, rest) = bytes.as_chunks::<8>();
        let hash = words
            .iter()
            .fold(hash, |hash, word| step(hash, u64::from_le_bytes(*word)));
        rest.iter()
            .fold(step(hash, bytes.len() as u64), |hash, &byte| step(hash, byte.into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_sees_every_byte() {
        let one = |bytes: &[u8]| fingerprint(&[("a", bytes)]);
        let base = one(b"0123456789");
        for at in 0..10 {
            let mut bytes = *b"0123456789";
            bytes[at] ^= 1;
            assert_ne!(one(&bytes), base, "byte {at}");
        }
        assert_ne!(one(b"012345678"), base);
    }

    #[test]
    fn every_file_of_the_folder_is_inside() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut here: Vec<String> = FILES.iter().map(|(name, _)| name.to_string()).collect();
        there.sort();
        here.sort();
        assert_eq!(here, there);
    }

    #[test]
    fn the_model_is_unpacked_once_and_again_when_damaged() {
        let cache = tempfile::tempdir().unwrap();
        let dir = folder(Some(cache.path())).unwrap();
        let shard = dir.join("model-00001-of-000014.safetensors");
        let written = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
        let first = written(&shard);
        assert_eq!(folder(Some(cache.path())).unwrap(), dir);
        assert_eq!(written(&shard), first);
        std::fs::write(&shard, "short").unwrap();
        folder(Some(cache.path())).unwrap();
        assert!(std::fs::metadata(&shard).unwrap().len() > 5);
        assert_eq!(std::fs::read_dir(dir.parent().unwrap()).unwrap().count(), 1);
    }
}
