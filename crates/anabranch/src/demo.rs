//! The model when none is named: the trained demo model, which ships inside the program and is unpacked at first use into
//! the user's folder of cached files, so that it is streamed from disk like any other.

use std::io::Write;
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
    if !whole(&dir) {
        unpack(&parent, &dir)?;
    }
    Ok(dir)
}

/// Whether the folder holds every file in full. Small files are compared, shards by their length and headers.
fn whole(dir: &Path) -> bool {
    let same = |(name, bytes): &(&str, &[u8])| {
        let path = dir.join(name);
        match name.ends_with(".safetensors") {
            true => std::fs::metadata(path).is_ok_and(|found| found.len() == bytes.len() as u64),
            false => std::fs::read(path).is_ok_and(|found| found == *bytes),
        }
    };
    FILES.iter().all(same) && Checkpoint::open(dir).is_ok()
}

/// Writes the files beside `dir` and moves them there. A whole folder is never taken away, since another process may be
/// reading it; a damaged one is moved aside.
fn unpack(parent: &Path, dir: &Path) -> Result<(), Error> {
    sweep(parent);
    let aside = |what: &str| dir.with_extension(format!("{}.{what}", std::process::id()));
    let (partial, old) = (aside("partial"), aside("old"));
    let moved = write(&partial).and_then(|()| {
        let there = |_: &std::io::Error| whole(dir);
        match std::fs::rename(&partial, dir) {
            Err(error) if there(&error) => Ok(()),
            Err(_) => {
                // Whoever moves a damaged folder first wins; the others find it gone or whole.
                let _ = std::fs::rename(dir, &old);
                match std::fs::rename(&partial, dir) {
                    Err(error) if !there(&error) => Err(Error::file(dir, "create", error)),
                    _ => Ok(()),
                }
            }
            Ok(()) => Ok(()),
        }
    });
    // Each is gone already where all went well.
    let _ = std::fs::remove_dir_all(&partial);
    let _ = std::fs::remove_dir_all(&old);
    moved
}

/// Removes what killed processes left behind: unfinished folders that nobody has touched for an hour.
fn sweep(parent: &Path) {
    const LEFT_BEHIND: std::time::Duration = std::time::Duration::from_secs(3600);
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        let unfinished = path.extension().is_some_and(|e| e == "partial" || e == "old");
        let modified = std::fs::metadata(&path).and_then(|m| m.modified());
        if unfinished && modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_BEHIND)) {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

fn write(folder: &Path) -> Result<(), Error> {
    // Left behind by a killed process that had the same number.
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).map_err(|e| Error::file(folder, "create", e))?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        let written = std::fs::File::create(&path).and_then(|mut file| {
            file.write_all(bytes)?;
            // The name must not become durable before the bytes.
            file.sync_all()
        });
        written.map_err(|e| Error::file(&path, "write", e))?;
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
        std::fs::write(dir.join("tiktoken.model"), "AA== 0\n").unwrap();
        folder(Some(cache.path())).unwrap();
        assert!(whole(&dir));
        assert_eq!(std::fs::read_dir(dir.parent().unwrap()).unwrap().count(), 1);
    }

    /// As many processes at once on a fresh folder: each gets a whole model, and nobody's is taken away.
    #[test]
    fn several_at_once_do_not_disturb_each_other() {
        let cache = tempfile::tempdir().unwrap();
        let parent = cache.path().join("anabranch");
        let dir = parent.join("demo");
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    // Threads share a process number, so each writes under a name of its own.
                    let mine = tempfile::tempdir_in(cache.path()).unwrap();
                    write(&mine.path().join("m")).unwrap();
                    std::fs::create_dir_all(&parent).unwrap();
                    let _ = std::fs::rename(mine.path().join("m"), &dir);
                    assert!(whole(&dir));
                });
            }
        });
        unpack(&parent, &dir).unwrap();
        assert!(whole(&dir));
    }
}
