//! `model.safetensors.index.json`: which shard holds which tensor.
//!
//! K3's index has 497,220 names in about 50 MB, so names are handed to the caller as they are met and never kept.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, MapAccess, Visitor};

use crate::error::Error;

/// File name of the index.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The most shards a checkpoint may have, so that a shard's number fits 16 bits; K3 has 96.
pub(crate) const MAX_SHARDS: usize = u16::MAX as usize - 1;

/// What an index says besides the names.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// Bytes of all tensors, where the index says so.
    pub(crate) total_size: Option<u64>,
    /// Shard file names in the order of their first mention.
    pub(crate) shards: Vec<String>,
}

/// Reads an index, calling `each(tensor name, place of its shard in `[`Index::shards`]`)` for every tensor.
pub(crate) fn read_index(path: &Path, each: &mut dyn FnMut(&str, u16)) -> Result<Index, Error> {
    let text = std::fs::read(path).map_err(|e| Error::io(path, "read", e))?;
    let mut index = Index::default();
    let mut deserializer = serde_json::Deserializer::from_slice(&text);
    let seed = Outer {
        index: &mut index,
        each,
    };
    seed.deserialize(&mut deserializer)
        .and_then(|()| deserializer.end())
        .map_err(|e| Error::Json {
            path: path.to_owned(),
            found: format!("an index that does not parse ({e})"),
            expected: "an object with weight_map, from tensor names to shard file names",
        })?;
    Ok(index)
}

/// A file name that stays inside the checkpoint's folder.
fn is_plain_file_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', '\0'])
}

struct Outer<'a> {
    index: &'a mut Index,
    each: &'a mut dyn FnMut(&str, u16),
}

impl<'de> DeserializeSeed<'de> for Outer<'_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Outer<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut weight_map = false;
        while let Some(Text(key)) = map.next_key()? {
            match &*key {
                "metadata" => self.index.total_size = map.next_value::<Metadata>()?.total_size,
                "weight_map" => {
                    weight_map = true;
                    let (shards, places) = (&mut self.index.shards, HashMap::new());
                    map.next_value_seed(WeightMap {
                        shards,
                        places,
                        each: &mut *self.each,
                    })?;
                }
                _ => drop(map.next_value::<de::IgnoredAny>()?),
            }
        }
        if weight_map {
            Ok(())
        } else {
            Err(de::Error::missing_field("weight_map"))
        }
    }
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    total_size: Option<u64>,
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

struct WeightMap<'a> {
    shards: &'a mut Vec<String>,
    places: HashMap<String, u16>,
    each: &'a mut dyn FnMut(&str, u16),
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to shard file names")
    }
    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((Text(tensor), Text(file))) = map.next_entry()? {
            let place = self.place(&file).map_err(de::Error::custom)?;
            (self.each)(&tensor, place);
        }
        Ok(())
    }
}

impl WeightMap<'_> {
    fn place(&mut self, file: &str) -> Result<u16, String> {
        if let Some(&place) = self.places.get(file) {
            return Ok(place);
        }
        if !is_plain_file_name(file) {
            return Err(format!(
                "{file:?} is not the name of a .safetensors file in this folder"
            ));
        }
        let place = u16::try_from(self.shards.len())
            .ok()
            .filter(|&place| usize::from(place) < MAX_SHARDS);
        let place = place.ok_or_else(|| format!("more than {MAX_SHARDS} shards"))?;
        self.shards.push(file.to_owned());
        self.places.insert(file.to_owned(), place);
        Ok(place)
    }
}

/// Names of all shards of a numbered set, from any one of its names such as `model-00001-of-000096.safetensors`.
pub(crate) fn numbered_set(name: &str) -> Option<Vec<String>> {
    let (stem, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let decimal = |text: &str| {
        text.bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| text.parse::<usize>().ok())?
    };
    let shards = decimal(count).filter(|shards| (1..=MAX_SHARDS).contains(shards))?;
    decimal(number)?;
    let width = number.len();
    Some(
        (1..=shards)
            .map(|i| format!("{stem}-{i:0width$}-of-{count}.safetensors"))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<(Index, Vec<(String, u16)>), Error> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), json).unwrap();
        let mut seen = Vec::new();
        let index = read_index(file.path(), &mut |name, shard| seen.push((name.to_owned(), shard)))?;
        Ok((index, seen))
    }

    #[test]
    fn names_go_to_shards_in_order_of_mention() {
        let (index, seen) = read(
            r#"{"weight_map":{"x":"2.safetensors","y\n":"1.safetensors","z":"2.safetensors"},
            "metadata":{"total_size":7,"other":"?"},"more":[1]}"#,
        )
        .unwrap();
        assert_eq!(index.total_size, Some(7));
        assert_eq!(index.shards, ["2.safetensors", "1.safetensors"]);
        assert_eq!(seen, [("x".into(), 0), ("y\n".into(), 1), ("z".into(), 0)]);
    }

    #[test]
    fn an_index_cannot_point_out_of_its_folder() {
        for name in [
            "../model.safetensors",
            "/etc/x.safetensors",
            "a\\\\b.safetensors",
            "passwd",
            "",
        ] {
            let text = read(&format!(r#"{{"weight_map":{{"x":"{name}"}}}}"#))
                .unwrap_err()
                .to_string();
            assert!(
                text.contains("is not the name of a .safetensors file in this folder"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_broken_index_is_refused() {
        for json in [
            "",
            "[]",
            "{}",
            r#"{"weight_map":[]}"#,
            r#"{"weight_map":{"x":1}}"#,
            r#"{"weight_map":{}} x"#,
        ] {
            assert!(matches!(read(json), Err(Error::Json { .. })), "{json}");
        }
    }

    #[test]
    fn numbering_gives_the_whole_set() {
        let set = numbered_set("model-00002-of-000003.safetensors").unwrap();
        assert_eq!(
            set,
            ["1", "2", "3"].map(|i| format!("model-0000{i}-of-000003.safetensors"))
        );
        for other in [
            "model.safetensors",
            "model-1-of-x.safetensors",
            "model-1-of-0.safetensors",
            "a-1-of-9999999.safetensors",
        ] {
            assert_eq!(numbered_set(other), None, "{other}");
        }
    }
}
