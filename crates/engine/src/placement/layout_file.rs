//! The file that lists drives.

use super::{Placement, PlacementError};
use serde::Deserialize;
use std::path::Path;

/// The version that is read.
const VERSION: u64 = 1;
/// Longest layout file in bytes.
const MAX_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u64,
    #[serde(default = "yes")]
    model_folder: bool,
    #[serde(default)]
    drives: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    path: String,
    #[serde(default)]
    note: String,
}

fn yes() -> bool {
    true
}

/// A drive as the user named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedDrive {
    /// The folder.
    pub path: std::path::PathBuf,
    /// The user's words about it; may be empty.
    pub note: String,
}

impl Placement {
    /// Reads a layout file (`docs/layout.md`).
    ///
    /// # Errors
    ///
    /// [`PlacementError::Io`] and [`PlacementError::LayoutFile`].
    pub fn read(path: &Path) -> Result<Self, PlacementError> {
        let failed = |error: std::io::Error| PlacementError::io(path, "read", &error);
        let len = std::fs::metadata(path).map_err(failed)?.len();
        if len > MAX_BYTES {
            return Err(wrong(path, format!("{len} bytes"), format!("at most {MAX_BYTES}")));
        }
        let text = std::fs::read(path).map_err(failed)?;
        let file: File = serde_json::from_slice(&text).map_err(|error| {
            wrong(
                path,
                format!("text that does not parse ({error})"),
                "a layout file".into(),
            )
        })?;
        if file.version != VERSION {
            return Err(wrong(path, format!("version {}", file.version), VERSION.to_string()));
        }
        let base = path.parent().unwrap_or(Path::new(""));
        let drives = file.drives.into_iter().map(|entry| NamedDrive {
            path: base.join(entry.path),
            note: entry.note,
        });
        let placement = Self {
            drives: drives.collect(),
            model_folder: file.model_folder,
        };
        if placement.drives.is_empty() && !placement.model_folder {
            return Err(wrong(
                path,
                "no drive, and the model's folder excluded".into(),
                "at least one place to read from".into(),
            ));
        }
        Ok(placement)
    }
}

fn wrong(path: &Path, found: String, expected: String) -> PlacementError {
    PlacementError::LayoutFile {
        path: path.to_path_buf(),
        found,
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Placement, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layout.json");
        std::fs::write(&path, text).unwrap();
        let mut placement = Placement::read(&path).map_err(|error| error.to_string())?;
        for drive in &mut placement.drives {
            if let Ok(inside) = drive.path.strip_prefix(folder.path()) {
                drive.path = inside.to_path_buf();
            }
        }
        Ok(placement)
    }

    #[test]
    fn the_documented_file_is_read() {
        let text = r#"{"version": 1, "model_folder": false,
            "drives": [{"path": "/mnt/a/kimi-k3", "note": "slot 1"}, {"path": "b"}]}"#;
        let named = |path: &str, note: &str| NamedDrive {
            path: path.into(),
            note: note.into(),
        };
        let expected = Placement {
            drives: vec![named("/mnt/a/kimi-k3", "slot 1"), named("b", "")],
            model_folder: false,
        };
        assert_eq!(read(text).unwrap(), expected);
        assert_eq!(read(r#"{"version": 1}"#).unwrap(), Placement::default());
    }

    #[test]
    fn other_files_are_refused() {
        for (text, expected) in [
            (r#"{"version": 2}"#, "found version 2, expected 1"),
            ("[]", "does not parse"),
            ("{}", "missing field `version`"),
            (r#"{"version": 1, "drive": []}"#, "unknown field `drive`"),
            (
                r#"{"version": 1, "drives": [{"path": "a", "speed": 1}]}"#,
                "unknown field `speed`",
            ),
            (
                r#"{"version": 1, "model_folder": false}"#,
                "expected at least one place to read from",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(error.contains("layout.json") && !error.contains('\n'), "{error}");
        }
        let error = Placement::read(Path::new("/none/layout.json")).unwrap_err();
        assert!(error.to_string().starts_with("/none/layout.json: cannot read"));
    }
}
