//! An opened checkpoint: complete, checked, and ready to say where every byte is.

use std::path::{Path, PathBuf};

use crate::config::K3Config;
use crate::error::Error;
use crate::places::{ExpertPlace, ExpertTable};
use crate::scan::{Scan, TensorInfo, scan};
use crate::schema::{Schema, Sizes};

/// One file of weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
}

/// A complete checkpoint: every tensor of the architecture is there, with the right type and shape.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: K3Config,
    stop_ids: Vec<u32>,
    schema: Schema,
    shards: Vec<Shard>,
    /// As [`Schema::trunk`].
    trunk: Vec<TensorInfo>,
    experts: ExpertTable,
    max_extents: usize,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: the configuration, the index and all headers are read and compared.
    ///
    /// The index may be absent; then every `.safetensors` file of the folder is a shard.
    ///
    /// # Errors
    ///
    /// The first problem of the folder, with the number of further ones; [`survey`](crate::survey()) lists them all.
    pub fn open(dir: &Path) -> Result<Checkpoint, Error> {
        let mut scan = scan(dir)?;
        if scan.problems.total > 0 {
            return Err(first_problem(&mut scan));
        }
        // Without a problem everything has been found; the errors below are for a reader who doubts that.
        let gone = |tensor: String| Error::MissingTensor {
            path: dir.to_owned(),
            tensor,
            place: "in one of the shards",
        };
        let config = scan
            .config
            .ok_or_else(|| Error::NotACheckpoint { path: dir.to_owned() })?;
        let schema = scan.schema.unwrap_or_else(|| Schema::new(&config));
        let trunk: Result<Vec<_>, _> = schema
            .trunk()
            .iter()
            .zip(&scan.trunk)
            .map(|(spec, info)| info.ok_or_else(|| gone(spec.name.clone())))
            .collect();
        let places = (0..scan.experts.len()).filter_map(|expert| scan.experts.place(expert));
        let max_extents = places.map(|place| place.extents().len()).max().unwrap_or(0);
        let shards = scan.shards.into_iter().map(|shard| Shard {
            path: shard.path,
            len: shard.found.unwrap_or(0),
        });
        Ok(Checkpoint {
            dir: scan.dir,
            stop_ids: scan.stop_ids,
            shards: shards.collect(),
            trunk: trunk?,
            experts: scan.experts,
            max_extents,
            config,
            schema,
        })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The configuration.
    pub fn config(&self) -> &K3Config {
        &self.config
    }

    /// Ids that end an answer, ascending; see [`stop_ids`](crate::stop_ids).
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The table of tensors that follows from the configuration.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Bytes by class.
    pub fn sizes(&self) -> Sizes {
        self.schema.sizes()
    }

    /// The shards in the order of their names. One that only a vision model needs may be missing; its length is then 0.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Where a trunk tensor is; `name` comes without the `language_model.` prefix.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`] for a name that is not in [`Schema::trunk`].
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.schema
            .place(name)
            .map(|place| &self.trunk[place])
            .ok_or_else(|| Error::NoSuchTensor {
                path: self.dir.clone(),
                name: name.to_owned(),
                count: self.trunk.len(),
            })
    }

    /// Where expert `expert` of layer `layer` is, both counted from 0.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchExpert`] for a layer without experts or an expert beyond their number.
    pub fn expert(&self, layer: usize, expert: usize) -> Result<ExpertPlace, Error> {
        let index = self.schema.expert_index(layer, expert);
        index
            .and_then(|index| self.experts.place(index))
            .ok_or_else(|| Error::NoSuchExpert {
                path: self.dir.clone(),
                layer,
                expert,
                first_layer: self.config.first_k_dense_replace,
                layers: self.config.num_hidden_layers,
                experts: self.config.num_experts,
            })
    }

    /// Bytes of the largest expert (all have the same size).
    pub fn max_expert_bytes(&self) -> u64 {
        self.schema.expert_bytes()
    }

    /// The most extents that any expert needs: 1 in the release; 0 for a model without experts.
    pub fn max_extents(&self) -> usize {
        self.max_extents
    }
}

/// The first problem, and how many follow it.
fn first_problem(scan: &mut Scan) -> Error {
    let first = scan.problems.listed.swap_remove(0);
    match scan.problems.total - 1 {
        0 => first,
        more => Error::Several {
            first: Box::new(first),
            more,
        },
    }
}
