//! Telling whether two files hold the same model without reading them whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::page::PAGE_BYTES;

use super::PackError;

/// Pages of a shard's data that its identity looks at, spread evenly from the first to the last.
pub const SAMPLES: u64 = 4;

/// Bytes that are read at once.
const READ_BYTES: u64 = 1 << 20;

/// What a shard is: its length and checksums of its head and of a sample of its data.
///
/// Equal identities mean the same names, types, shapes and places, and most likely the same weights: training a model further
/// changes nearly all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// Length of the file in bytes.
    pub len: u64,
    /// CRC-32C of the bytes in front of the data.
    pub head_crc: u32,
    /// CRC-32C of [`SAMPLES`] pages of the data.
    pub sample_crc: u32,
}

impl FileIdentity {
    /// Reads the identity of a file whose data begins after `head_bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`PackError::Io`] when the file cannot be read or ends inside its head.
    pub fn read(path: &Path, head_bytes: u64) -> Result<Self, PackError> {
        read(path, head_bytes).map_err(|error| PackError::io(path, "read", &error))
    }

    /// What differs between this file, a copy, and the `model`'s: found and expected. `None` when nothing does.
    pub fn difference(&self, model: &Self) -> Option<(String, String)> {
        let (what, found, expected) = if self.len != model.len {
            return Some((format!("{} bytes", self.len), model.len.to_string()));
        } else if self.head_crc != model.head_crc {
            ("a header", self.head_crc, model.head_crc)
        } else if self.sample_crc != model.sample_crc {
            ("sampled weights", self.sample_crc, model.sample_crc)
        } else {
            return None;
        };
        Some((
            format!("{what} with checksum {found:08x}"),
            format!("{expected:08x} as in the model's folder"),
        ))
    }
}

fn read(path: &Path, head_bytes: u64) -> io::Result<FileIdentity> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut buffer = vec![0; READ_BYTES as usize];
    let mut crc = |mut crc: u32, from: u64, to: u64| -> io::Result<u32> {
        for start in (from..to).step_by(READ_BYTES as usize) {
            let part = &mut buffer[..READ_BYTES.min(to - start) as usize];
            file.read_exact_at(part, start)?;
            crc = crc32c::crc32c_append(crc, part);
        }
        Ok(crc)
    };
    let head_crc = crc(0, 0, head_bytes)?;
    let data = len.saturating_sub(head_bytes);
    let page = data.min(PAGE_BYTES as u64);
    let mut sample_crc = 0;
    for sample in 0..SAMPLES {
        let start = head_bytes + (data - page) * sample / (SAMPLES - 1);
        sample_crc = crc(sample_crc, start, start + page)?;
    }
    Ok(FileIdentity {
        len,
        head_crc,
        sample_crc,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: u64 = 100;

    fn identity(bytes: &[u8]) -> FileIdentity {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        FileIdentity::read(file.path(), HEAD).unwrap()
    }

    #[test]
    fn length_head_and_weights_each_tell_files_apart() {
        let model: Vec<u8> = (0..100_000u32).map(|n| (n % 251) as u8).collect();
        let ours = identity(&model);
        assert_eq!(ours.difference(&identity(&model)), None);

        let (found, expected) = identity(&model[..99_999]).difference(&ours).unwrap();
        assert_eq!((found.as_str(), expected.as_str()), ("99999 bytes", "100000"));
        for (place, what) in [(99, "a header"), (100, "sampled weights"), (99_999, "sampled weights")] {
            let mut other = model.clone();
            other[place] ^= 1;
            let (found, expected) = identity(&other).difference(&ours).unwrap();
            assert!(found.starts_with(what), "byte {place}: {found}");
            assert!(expected.ends_with("as in the model's folder"));
        }
        // What is not sampled is not seen: that is what checksums are for.
        let mut other = model.clone();
        other[20_000] ^= 1;
        assert_eq!(identity(&other).difference(&ours), None);
    }

    #[test]
    fn files_without_a_page_of_data_have_an_identity() {
        assert_ne!(identity(&[1; 100]), identity(&[1; 101]));
        assert_ne!(
            identity(&[1; 101]).sample_crc,
            identity(&[[1; 100], [2; 100]].concat()).sample_crc
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0; 10]).unwrap();
        let error = FileIdentity::read(file.path(), HEAD).unwrap_err().to_string();
        assert!(error.contains("cannot read"), "{error}");
    }
}
