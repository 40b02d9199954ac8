//! What an answer depends on besides the question, as one number.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use checkpoint::Checkpoint;
use engine::{Identity, TrunkFormat};

use super::input;
use crate::error::Error;
use crate::settings::Jobs;

/// Small files that decide what text becomes which tokens and where answers end.
const FILES: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "tiktoken.model"];

/// A hash of the model's identity and small files, the numerics, and the settings that answer for lines that say nothing.
pub fn hash(checkpoint: &Checkpoint, settings: &Jobs, max_tokens: usize) -> Result<u128, Error> {
    let mut parts = vec![];
    for name in FILES {
        parts.push(contents(&checkpoint.dir().join(name))?);
    }
    let machine = &settings.machine;
    let model = Identity::read(checkpoint)?;
    let trunk = match machine.trunk.format() {
        TrunkFormat::Bf16 => String::new(),
        converted => format!(", trunk {converted}"),
    };
    let said = format!(
        "model {model} of {} bytes, numerics {}, effort {:?}, {max_tokens} tokens, epsilon {:08x}, latents {:?}{trunk}",
        model.bytes,
        engine::NUMERICS_VERSION,
        settings.effort,
        machine.mla_eps.to_bits(),
        machine.kv,
    );
    parts.push(said.into_bytes());
    Ok(input::hash(parts.iter().map(Vec::as_slice)))
}

/// Nothing where there is no such file.
fn contents(path: &Path) -> Result<Vec<u8>, Error> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(vec![]),
        read => read.map_err(|error| Error::file(path, "read", error)),
    }
}
