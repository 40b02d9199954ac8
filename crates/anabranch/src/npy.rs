//! NumPy's `.npy` files of f32, written piece by piece and published whole.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Header and data begin at multiples of this (NumPy, `numpy.lib.format`, version 1.0).
const ALIGN: usize = 64;

/// A file in the making, beside its target under a temporary name, which is removed unless [`finish`](Self::finish) is
/// reached.
pub struct NpyWriter {
    file: BufWriter<File>,
    partial: PathBuf,
    target: PathBuf,
    values_left: u64,
}

impl NpyWriter {
    /// Begins the array of `shape` that will be at `target`.
    pub fn create(target: &Path, shape: &[usize]) -> Result<Self, Error> {
        let target = &check_target(target)?;
        let name = target
            .file_name()
            .ok_or_else(|| Error::Usage(format!("--out: found {target:?}, expected the name of a file")))?;
        let mut partial_name = name.to_owned();
        partial_name.push(format!(".{}.partial", std::process::id()));
        let partial = target.with_file_name(partial_name);
        let open = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&partial);
        let file = open.map_err(|e| Error::file(&partial, "create", e))?;
        let mut writer = Self {
            file: BufWriter::with_capacity(1 << 20, file),
            partial,
            target: target.to_owned(),
            values_left: shape.iter().map(|&n| n as u64).product(),
        };
        writer.bytes(&header(shape))?;
        Ok(writer)
    }

    /// Writes the next values.
    pub fn write(&mut self, values: &[f32]) -> Result<(), Error> {
        self.values_left -= values.len() as u64;
        for value in values {
            self.bytes(&value.to_le_bytes())?;
        }
        Ok(())
    }

    /// Gives the complete file its name.
    pub fn finish(mut self) -> Result<(), Error> {
        assert_eq!(self.values_left, 0, "an array ended early");
        let written = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        written.map_err(|e| Error::file(&self.partial, "write", e))?;
        std::fs::rename(&self.partial, &self.target).map_err(|e| Error::file(&self.target, "create", e))
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all(bytes)
            .map_err(|e| Error::file(&self.partial, "write", e))
    }
}

/// Where the file really goes: a link's target, and nothing but a regular file is replaced.
pub fn check_target(target: &Path) -> Result<PathBuf, Error> {
    let target = std::fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
    match std::fs::metadata(&target) {
        Ok(found) if !found.is_file() => Err(Error::Usage(format!(
            "--out: {} is not a regular file, expected a new name or a file to replace",
            target.display()
        ))),
        _ => Ok(target),
    }
}

impl Drop for NpyWriter {
    fn drop(&mut self) {
        // Gone already after a rename; after a failure the first error matters more.
        let _ = std::fs::remove_file(&self.partial);
    }
}

fn header(shape: &[usize]) -> Vec<u8> {
    let dims: String = shape.iter().map(|n| format!("{n}, ")).collect();
    // A tuple of one needs its comma, a longer one does not mind.
    let dims = dims.trim_end();
    let mut dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({dims}), }}");
    const FIXED: usize = 10;
    while !(FIXED + dict.len() + 1).is_multiple_of(ALIGN) {
        dict.push(' ');
    }
    dict.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((dict.len() as u16).to_le_bytes());
    bytes.extend(dict.into_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_numpys() {
        let bytes = header(&[2, 3]);
        assert_eq!(bytes.len(), 128);
        assert_eq!(bytes[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        let text = std::str::from_utf8(&bytes[10..]).unwrap();
        assert!(text.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3,), }"));
        assert!(text.ends_with(" \n"));
        assert!(String::from_utf8_lossy(&header(&[5])).contains("'shape': (5,), }"));
    }

    #[test]
    fn only_a_finished_file_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a.npy");
        let mut writer = NpyWriter::create(&target, &[2, 2]).unwrap();
        writer.write(&[1.0, 2.0]).unwrap();
        drop(writer);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let mut writer = NpyWriter::create(&target, &[2, 2]).unwrap();
        writer.write(&[1.0, 2.0]).unwrap();
        writer.write(&[-3.0, 4.0]).unwrap();
        writer.finish().unwrap();
        let names: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, ["a.npy"]);
        let bytes = std::fs::read(&target).unwrap();
        assert_eq!(bytes.len(), 128 + 16);
        assert_eq!(bytes[136..140], (-3.0f32).to_le_bytes());
    }
}
