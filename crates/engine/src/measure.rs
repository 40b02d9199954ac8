//! Whether drives are measured before they are read, and where that is remembered.

use crate::error::Error;
use drives::{Layout, Notices, Profile};
use std::path::PathBuf;
use std::sync::Arc;

/// Fewer bytes of experts are read sooner than drives are measured.
pub const MEASURE_LEAST_BYTES: u64 = 1 << 30;

/// Whether drives are measured, which takes about a second. Without it their speeds are learnt while they are read, and all are
/// read with the same chunk size and depth. Models with less than [`MEASURE_LEAST_BYTES`] of experts are never measured for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// No.
    #[default]
    Never,
    /// At every start.
    Always,
    /// At the first start with these drives, and again when a device has changed. Kept in this folder, which is made when it is
    /// missing.
    Remember(PathBuf),
}

impl Measure {
    pub(crate) fn profile(&self, layout: &Arc<Layout>, notices: &Notices) -> Result<Option<Profile>, Error> {
        let experts = layout.experts().iter();
        let bytes: u64 = experts.filter_map(|&expert| layout.expert_bytes(expert)).sum();
        if bytes < MEASURE_LEAST_BYTES {
            return Ok(None);
        }
        let profile = match self {
            Self::Never => return Ok(None),
            Self::Always => Profile::measure(layout, notices)?,
            Self::Remember(folder) => {
                // Where it cannot be made, the attempt to write there becomes a notice.
                let _ = std::fs::create_dir_all(folder);
                Profile::load_or_measure(layout, &folder.join(file_name(layout)), notices)?
            }
        };
        Ok(Some(profile))
    }
}

/// A name for these drives in this order, so that another set of drives does not take its place.
fn file_name(layout: &Layout) -> String {
    let mut name = String::from("drives");
    for drive in layout.drives() {
        name += &format!("-{:x}", drive.device.unwrap_or_default());
    }
    name + ".json"
}
