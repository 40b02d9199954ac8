use crate::error::Error;
use checkpoint::{Checkpoint, RawHeader};
use drives::FileIdentity;
use std::path::Path;

/// What tells one model from another without reading it whole: the configuration, the shards' names, lengths and headers, and a
/// sample of their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Bytes of all shards.
    pub bytes: u64,
    /// CRC-32C of `config.json`.
    pub config_crc: u32,
    /// CRC-32C of the shards' names, lengths and header checksums.
    pub heads_crc: u32,
    /// CRC-32C of the shards' sample checksums, see [`FileIdentity`].
    pub samples_crc: u32,
}

impl Identity {
    /// Reads the identity of a checkpoint: all headers, and [`drives::SAMPLES`] pages of each shard.
    ///
    /// # Errors
    ///
    /// [`Error::Session`] or [`Error::Checkpoint`] when a file cannot be read.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let config = checkpoint.dir().join("config.json");
        let config = std::fs::read(&config).map_err(|error| super::SessionError::io(&config, "read", error))?;
        let mut identity = Self {
            bytes: 0,
            config_crc: crc32c::crc32c(&config),
            heads_crc: 0,
            samples_crc: 0,
        };
        // A length of 0 stands for a shard that only a vision model needs and that is not there.
        for shard in checkpoint.shards().iter().filter(|shard| shard.len > 0) {
            let head_bytes = RawHeader::read(&shard.path)?.data_start();
            let file = FileIdentity::read(&shard.path, head_bytes).map_err(crate::PlacementError::from)?;
            identity.bytes += file.len;
            let name = shard.path.file_name().map(Path::new).map(|name| name.as_os_str());
            let name = name.map_or(&[][..], |name| name.as_encoded_bytes());
            for bytes in [name, &file.len.to_le_bytes(), &file.head_crc.to_le_bytes()] {
                identity.heads_crc = crc32c::crc32c_append(identity.heads_crc, bytes);
            }
            identity.samples_crc = crc32c::crc32c_append(identity.samples_crc, &file.sample_crc.to_le_bytes());
        }
        Ok(identity)
    }

    /// What differs from `expected`: found and expected. `None` when nothing does.
    pub fn difference(&self, expected: &Self) -> Option<(String, String)> {
        let (what, found, expected) = if self.config_crc != expected.config_crc {
            ("config.json", self.config_crc, expected.config_crc)
        } else if self.bytes != expected.bytes {
            let of = |bytes: u64| format!("a model of {bytes} bytes");
            return Some((of(self.bytes), of(expected.bytes)));
        } else if self.heads_crc != expected.heads_crc {
            ("shard headers", self.heads_crc, expected.heads_crc)
        } else if self.samples_crc != expected.samples_crc {
            ("weights", self.samples_crc, expected.samples_crc)
        } else {
            return None;
        };
        Some((
            format!("a model whose {what} have checksum {found:08x}"),
            format!("{expected:08x}"),
        ))
    }
}

impl std::fmt::Display for Identity {
    /// As a name of a folder.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:08x}{:08x}{:08x}",
            self.config_crc, self.heads_crc, self.samples_crc
        )
    }
}
