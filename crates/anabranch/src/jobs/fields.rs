//! The fields of a JSON object, taken one by one, so that what is left over is what nobody knows.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Why a line has no answer, in the words of the results.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LineError {
    /// For programs.
    pub code: &'static str,
    /// For people: what was found and what was expected.
    pub message: String,
}

impl LineError {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// What is left of an object.
pub struct Fields {
    /// Where the object stands, such as `body.messages[2]`; empty for the line itself.
    path: String,
    left: Map<String, Value>,
}

impl Fields {
    /// The fields of `value`, which must be an object.
    pub fn of(value: Value, path: impl Into<String>) -> Result<Self, LineError> {
        let path = path.into();
        match value {
            Value::Object(left) => Ok(Self { path, left }),
            other => {
                let place = if path.is_empty() { "the line" } else { &path };
                let message = format!("{place}: found {}, expected a JSON object", short(&other));
                Err(LineError::new("invalid_type", message))
            }
        }
    }

    /// Takes a field; null counts as not given.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<Option<T>, LineError> {
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let found = short(&value);
                let typed = serde_json::from_value(value).map(Some);
                typed.map_err(|_| self.wrong("invalid_type", name, &found, expected))
            }
        }
    }

    /// Takes a field that must be given.
    pub fn need<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<T, LineError> {
        self.take(name, expected)?
            .ok_or_else(|| self.wrong("missing_field", name, "nothing", expected))
    }

    /// Takes a field whose value must be one that fits.
    pub fn within<T: DeserializeOwned + ToString>(
        &mut self,
        name: &str,
        expected: &str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, LineError> {
        match self.take::<T>(name, expected)? {
            Some(value) if !fits(&value) => Err(self.wrong("invalid_value", name, &value.to_string(), expected)),
            value => Ok(value),
        }
    }

    /// Takes a field that may only have the value that changes nothing.
    pub fn only(&mut self, name: &str, neutral: &Value) -> Result<(), LineError> {
        match self.take::<Value>(name, "")? {
            Some(found) if !same(&found, neutral) => {
                let expected = format!("{neutral}, or leave it out");
                Err(self.wrong("unsupported_value", name, &short(&found), &expected))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what nobody took.
    pub fn end(self) -> Result<(), LineError> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(name) => {
                let message = format!("{}: this field is not known here; leave it out", self.name(name));
                Err(LineError::new("unknown_field", message))
            }
        }
    }

    /// An error about a field.
    pub fn wrong(&self, code: &'static str, name: &str, found: &str, expected: &str) -> LineError {
        LineError::new(code, format!("{}: found {found}, expected {expected}", self.name(name)))
    }

    fn name(&self, name: &str) -> String {
        match self.path.as_str() {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }
}

/// Equal, where 0 and 0.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// A value for a message: its beginning.
pub fn short(value: &Value) -> String {
    const CHARACTERS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CHARACTERS) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
