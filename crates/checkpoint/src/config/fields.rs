//! Fields of a JSON object, taken by name, with errors that name them in full.

use std::fmt::Display;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// The longest piece of a value that an error quotes, in characters.
const QUOTE_CHARS: usize = 80;

/// One object of a JSON file, its name in that file, and the file.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    file: &'a Path,
    outer: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The outermost object of `file`.
    pub(crate) fn root(file: &'a Path, value: &'a Value) -> Result<Fields<'a>, Error> {
        let object = value.as_object().ok_or_else(|| Error::Json {
            path: file.to_owned(),
            found: quote(value),
            expected: "a JSON object",
        })?;
        Ok(Fields {
            file,
            outer: "",
            object,
        })
    }

    /// The object at `name`, which is called `full` in errors.
    pub(crate) fn object(&self, name: &str, full: &'a str) -> Result<Fields<'a>, Error> {
        let value = self.required(name, "an object")?;
        let object = value
            .as_object()
            .ok_or_else(|| self.wrong(name, quote(value), "an object"))?;
        Ok(Fields {
            file: self.file,
            outer: full,
            object,
        })
    }

    /// The names of the object's fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }

    /// The value at `name`; `null` counts as absent.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn required(&self, name: &str, expected: &str) -> Result<&'a Value, Error> {
        self.get(name).ok_or_else(|| self.wrong(name, "nothing", expected))
    }

    /// The error for the field `name`.
    pub(crate) fn wrong(&self, name: &str, found: impl Display, expected: impl Display) -> Error {
        let dot = if self.outer.is_empty() { "" } else { "." };
        Error::Config {
            path: self.file.to_owned(),
            field: format!("{}{dot}{name}", self.outer),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// A whole number in `low..=high`.
    pub(crate) fn count(&self, name: &str, low: usize, high: usize) -> Result<usize, Error> {
        let expected = format!("a whole number from {low} to {high}");
        let value = self.required(name, &expected)?;
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
        number
            .filter(|n| (low..=high).contains(n))
            .ok_or_else(|| self.wrong(name, quote(value), expected))
    }

    /// The same, with a value for an absent field.
    pub(crate) fn count_or(&self, name: &str, default: usize, low: usize, high: usize) -> Result<usize, Error> {
        if self.get(name).is_none() {
            Ok(default)
        } else {
            self.count(name, low, high)
        }
    }

    /// A finite number that is not an f32 infinity.
    pub(crate) fn number(&self, name: &str) -> Result<f32, Error> {
        let expected = "a number";
        let value = self.required(name, expected)?;
        let number = value.as_f64().map(|n| n as f32).filter(|n| n.is_finite());
        number.ok_or_else(|| self.wrong(name, quote(value), expected))
    }

    /// The same, with a value for an absent field.
    pub(crate) fn number_or(&self, name: &str, default: f32) -> Result<f32, Error> {
        if self.get(name).is_none() {
            Ok(default)
        } else {
            self.number(name)
        }
    }

    /// A list of whole numbers.
    pub(crate) fn counts(&self, name: &str) -> Result<Vec<usize>, Error> {
        let expected = "a list of whole numbers";
        let value = self.required(name, expected)?;
        let items = value
            .as_array()
            .ok_or_else(|| self.wrong(name, quote(value), expected))?;
        let number = |item: &Value| item.as_u64().and_then(|n| usize::try_from(n).ok());
        items
            .iter()
            .map(|item| number(item).ok_or_else(|| self.wrong(name, quote(item), expected)))
            .collect()
    }

    /// The field must hold `expected`; absent it counts as `default`.
    pub(crate) fn must_be(&self, name: &str, default: Option<Value>, expected: Value) -> Result<(), Error> {
        match self.get(name).cloned().or(default) {
            Some(value) if value == expected => Ok(()),
            Some(value) => Err(self.wrong(name, quote(&value), format!("{expected}, the only value supported"))),
            None => Err(self.wrong(name, "nothing", expected)),
        }
    }
}

/// A value as JSON, cut short where it is long.
pub(crate) fn quote(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(QUOTE_CHARS) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
