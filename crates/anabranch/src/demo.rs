//! The model when none is named: the trained one that ships with the program; where that is not found (a program moved
//! away by itself), a synthetic one, made at first use in the user's folder of cached files.

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, SYNTH_VERSION, synthesize};

use crate::error::Error;
use crate::output::{self, Meter};
use crate::settings::DemoPlaces;
use crate::signals::Interrupt;

/// Every feature of Kimi K3 in 10 MB.
const CONFIG: &str = include_str!("../demo/config.json");
const SEED: u64 = 1;

/// The demo model's folder.
pub fn folder(places: &DemoPlaces, interrupt: &Interrupt) -> Result<PathBuf, Error> {
    let shipped = places.shipped.iter().find(|dir| dir.join("config.json").exists());
    if let Some(dir) = shipped {
        output::note("no --model was given: this is the small demo model");
        return Ok(dir.clone());
    }
    let parent = places.cache.as_deref().ok_or(Error::NoCache)?.join("anabranch");
    let dir = parent.join(format!("demo-v{SYNTH_VERSION}-{:016x}", fingerprint(CONFIG)));
    output::note(format_args!(
        "no --model was given, and the demo model is not beside the program: this is a synthetic model with random \
         weights, so its text means nothing ({})",
        dir.display()
    ));
    if Checkpoint::open(&dir).is_err() {
        make(&dir, interrupt)?;
    }
    Ok(dir)
}

/// Writes the model beside `dir` and moves it there.
fn make(dir: &Path, interrupt: &Interrupt) -> Result<(), Error> {
    let partial = dir.with_extension(format!("{}.partial", std::process::id()));
    // Left behind by a killed process that had the same number.
    let _ = std::fs::remove_dir_all(&partial);
    let mut meter = Meter::new();
    let made = synthesize(CONFIG, SEED, &partial, false, &mut |progress| {
        meter.show(|| format!("making the demo model: {} %", 100 * progress.bytes / progress.total));
        if interrupt.cancel().is_cancelled() {
            progress.stop();
        }
    });
    if let Err(error) = made {
        let _ = std::fs::remove_dir_all(&partial);
        return Err(error.into());
    }
    // One that is damaged gives way. So does a whole one that another process finished just now, for an equal one.
    let _ = std::fs::remove_dir_all(dir);
    if let Err(error) = std::fs::rename(&partial, dir) {
        let _ = std::fs::remove_dir_all(&partial);
        if Checkpoint::open(dir).is_err() {
            return Err(Error::file(dir, "create", error));
        }
    }
    Ok(())
}

/// FNV-1a of 64 bits (Fowler, Noll, Vo): enough to tell one configuration from the next.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_is_fnv_1a() {
        assert_eq!(fingerprint(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fingerprint("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_synthetic_model_is_made_once_and_again_when_damaged() {
        let cache = tempfile::tempdir().unwrap();
        let places = DemoPlaces {
            shipped: vec![cache.path().join("nothing")],
            cache: Some(cache.path().to_owned()),
        };
        let folder = || folder(&places, &Interrupt::default()).unwrap();
        let dir = folder();
        let shard = dir.join("model-00001-of-000010.safetensors");
        let written = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
        let first = written(&shard);
        assert_eq!(folder(), dir);
        assert_eq!(written(&shard), first);
        std::fs::remove_file(&shard).unwrap();
        folder();
        assert!(shard.exists());
        assert_eq!(std::fs::read_dir(dir.parent().unwrap()).unwrap().count(), 1);
        let bytes: u64 = std::fs::read_dir(&dir)
            .unwrap()
            .map(|e| e.unwrap().metadata().unwrap().len())
            .sum();
        assert!((5_000_000..15_000_000).contains(&bytes), "{bytes}");
    }
}
