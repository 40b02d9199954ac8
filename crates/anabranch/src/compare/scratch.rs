//! Logits of the first side, on disk until the second has its own: for K3 655 KB a token.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::wanted;
use crate::error::Error;

/// Bytes gathered before they are written.
const BUFFER_BYTES: usize = 1 << 20;

/// A file without a name, which is gone when the process is.
pub struct Scratch {
    /// The name that it had.
    path: PathBuf,
    writer: BufWriter<File>,
    reader: BufReader<File>,
    bytes: Vec<u8>,
}

impl Scratch {
    /// A file in `folder`, which is made if need be, for `bytes` bytes.
    pub fn create(folder: &Path, bytes: u64) -> Result<Self, Error> {
        std::fs::create_dir_all(folder).map_err(|error| Error::file(folder, "create", error))?;
        let free = drives::free_bytes(folder).map_err(|error| Error::file(folder, "examine", error))?;
        if free < bytes {
            return Err(Error::NoScratch {
                path: folder.to_owned(),
                free,
                wanted: wanted(bytes),
            });
        }
        let path = folder.join(format!("compare-{}.scratch", std::process::id()));
        let failed = |error| Error::file(&path, "create", error);
        let options = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .clone();
        let file = options.open(&path).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        Ok(Self {
            writer: BufWriter::with_capacity(BUFFER_BYTES, file.try_clone().map_err(failed)?),
            reader: BufReader::with_capacity(BUFFER_BYTES, file),
            bytes: vec![],
            path,
        })
    }

    /// Writes the next numbers.
    pub fn write(&mut self, numbers: &[f32]) -> Result<(), Error> {
        self.bytes.clear();
        self.bytes
            .extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let written = self.writer.write_all(&self.bytes);
        written.map_err(|error| Error::file(&self.path, "write", error))
    }

    /// What was written is read from its beginning.
    pub fn rewind(&mut self) -> Result<(), Error> {
        let turned = self.writer.flush().and_then(|()| self.reader.rewind());
        turned.map_err(|error| Error::file(&self.path, "write", error))
    }

    /// Reads the next numbers.
    pub fn read(&mut self, numbers: &mut [f32]) -> Result<(), Error> {
        self.bytes.resize(size_of_val(numbers), 0);
        let read = self.reader.read_exact(&mut self.bytes);
        read.map_err(|error| Error::file(&self.path, "read", error))?;
        for (number, bytes) in numbers.iter_mut().zip(self.bytes.as_chunks().0) {
            *number = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_no_name_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("made");
        let mut scratch = Scratch::create(&inner, 100).unwrap();
        scratch.write(&[1.0, -0.0]).unwrap();
        scratch.write(&[f32::MIN_POSITIVE]).unwrap();
        scratch.rewind().unwrap();
        let mut numbers = [0.0; 3];
        scratch.read(&mut numbers).unwrap();
        assert_eq!(
            numbers.map(f32::to_bits),
            [1.0, -0.0, f32::MIN_POSITIVE].map(f32::to_bits)
        );
        assert!(scratch.read(&mut numbers).is_err());
        assert_eq!(std::fs::read_dir(inner).unwrap().count(), 0);
    }

    #[test]
    fn too_little_room_is_known_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let error = Scratch::create(folder.path(), u64::MAX).err().unwrap().to_string();
        assert!(
            error.contains("bytes free, expected at least 18446744073709551615"),
            "{error}"
        );
    }
}
