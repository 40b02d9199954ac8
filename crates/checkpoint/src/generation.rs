//! Which tokens end an answer: `generation_config.json` and `tokenizer_config.json`.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use crate::config::{Fields, K3Config, parse_json};
use crate::error::Error;

/// The ids that stop generation, ascending: `eos_token_id` of `generation_config.json` (a number or a list; without
/// the file, of `config.json`) and the token that `tokenizer_config.json` calls `eos_token`.
///
/// In the release these are 163586 `<|end_of_msg|>` and 163585 `[EOS]`.
///
/// # Errors
///
/// One of the two files exists but cannot be read or says something else than ids of this vocabulary.
pub fn stop_ids(dir: &Path, config: &K3Config) -> Result<Vec<u32>, Error> {
    let mut ids = match read_optional(&dir.join("generation_config.json"))? {
        None => vec![config.eos_token_id],
        Some(json) => generation_eos(&dir.join("generation_config.json"), &json, config)?,
    };
    if let Some(json) = read_optional(&dir.join("tokenizer_config.json"))? {
        ids.extend(tokenizer_eos(&dir.join("tokenizer_config.json"), &json, config)?);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The JSON of a file that need not exist.
fn read_optional(path: &Path) -> Result<Option<Value>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse_json(&text, path).map(Some),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path, "read", e)),
    }
}

fn generation_eos(path: &Path, json: &Value, config: &K3Config) -> Result<Vec<u32>, Error> {
    let fields = Fields::root(path, json)?;
    match fields.get("eos_token_id") {
        None => Ok(vec![config.eos_token_id]),
        Some(Value::Array(_)) => {
            let ids = fields.counts("eos_token_id")?;
            match ids.iter().find(|&&id| id >= config.vocab_size) {
                None => Ok(ids.iter().map(|&id| id as u32).collect()),
                Some(id) => Err(fields.wrong("eos_token_id", id, format!("ids below {}", config.vocab_size))),
            }
        }
        Some(_) => Ok(vec![fields.count("eos_token_id", 0, config.vocab_size - 1)? as u32]),
    }
}

/// The id that `added_tokens_decoder` gives to `eos_token`, which is a string or an object with `content`.
fn tokenizer_eos(path: &Path, json: &Value, config: &K3Config) -> Result<Option<u32>, Error> {
    let fields = Fields::root(path, json)?;
    let Some(eos) = fields.get("eos_token") else {
        return Ok(None);
    };
    let Some(name) = eos.as_str().or_else(|| eos.get("content")?.as_str()) else {
        return Err(fields.wrong("eos_token", eos, "a token"));
    };
    if fields.get("added_tokens_decoder").is_none() {
        return Ok(None);
    }
    let added = fields.object("added_tokens_decoder", "added_tokens_decoder")?;
    let is_eos = |id: &&str| added.get(id).and_then(|token| token.get("content")?.as_str()) == Some(name);
    let Some(id) = added.names().find(is_eos) else {
        return Err(fields.wrong("eos_token", format!("{name:?}"), "one of added_tokens_decoder"));
    };
    let number = id
        .parse()
        .ok()
        .filter(|&number: &u32| (number as usize) < config.vocab_size);
    let number = number.ok_or_else(|| added.wrong(id, "this id", format!("ids below {}", config.vocab_size)))?;
    Ok(Some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(generation: Option<&str>, tokenizer: Option<&str>) -> Result<Vec<u32>, Error> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("generation_config.json", generation),
            ("tokenizer_config.json", tokenizer),
        ] {
            if let Some(text) = text {
                std::fs::write(dir.path().join(name), text).unwrap();
            }
        }
        let config = include_str!("../testdata/k3-tiny-config.json");
        stop_ids(dir.path(), &K3Config::parse(config, Path::new("config.json")).unwrap())
    }

    #[test]
    fn ids_come_from_both_files() {
        let tokenizer =
            r#"{"eos_token":"[EOS]","added_tokens_decoder":{"256":{"content":"[BOS]"},"257":{"content":"[EOS]"}}}"#;
        assert_eq!(
            stops(Some(r#"{"eos_token_id":258}"#), Some(tokenizer)).unwrap(),
            [257, 258]
        );
        assert_eq!(
            stops(Some(r#"{"eos_token_id":[9,257,3]}"#), Some(tokenizer)).unwrap(),
            [3, 9, 257]
        );
        let object = tokenizer.replacen("\"[EOS]\"", r#"{"content":"[EOS]"}"#, 1);
        assert_eq!(stops(None, Some(&object)).unwrap(), [257, 502]);
        assert_eq!(stops(None, None).unwrap(), [502]);
        assert_eq!(stops(Some("{}"), Some("{}")).unwrap(), [502]);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (generation, tokenizer, name) in [
            (Some(r#"{"eos_token_id":512}"#), None, "eos_token_id"),
            (Some(r#"{"eos_token_id":[1,512]}"#), None, "eos_token_id"),
            (Some(r#"{"eos_token_id":"x"}"#), None, "eos_token_id"),
            (Some("?"), None, "generation_config.json"),
            (None, Some(r#"{"eos_token":3}"#), "eos_token"),
            (
                None,
                Some(r#"{"eos_token":"[EOS]","added_tokens_decoder":{}}"#),
                "eos_token",
            ),
            (
                None,
                Some(r#"{"eos_token":"e","added_tokens_decoder":{"512":{"content":"e"}}}"#),
                "added_tokens_decoder.512",
            ),
        ] {
            let text = stops(generation, tokenizer).unwrap_err().to_string();
            assert!(text.contains(name) && !text.contains('\n'), "{text}");
        }
    }
}
