//! Logging to stderr: as text lines for people, or as one JSON object per line.

use std::fmt;
use std::io;
use std::time::SystemTime;

use clap::ValueEnum;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::terminal;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Lines for people
    Text,
    /// An object in a line: timestamp, level, target, message, fields
    Json,
}

/// Starts logging for the lifetime of this process.
pub(super) fn to_stderr(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(terminal::LogWriter::default);
    match format {
        LogFormat::Text => {
            let has_colours = terminal::is_terminal(io::stderr()) && !wants_no_colour();
            log.with_ansi(has_colours).init();
        }
        LogFormat::Json => log.with_ansi(false).event_format(Json).init(),
    }
}

/// Returns whether the user disabled colours, by no-color.org's convention.
fn wants_no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Formats an event as one JSON object per line.
struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writeln!(writer, "{}", object(event, SystemTime::now()))
    }
}

fn object(event: &Event<'_>, now: SystemTime) -> Value {
    let mut fields = Fields::default();
    event.record(&mut fields);
    let mut object = Map::new();
    let time = humantime::format_rfc3339_micros(now).to_string();
    object.insert("timestamp".to_owned(), time.into());
    let metadata = event.metadata();
    object.insert("level".to_owned(), metadata.level().as_str().into());
    object.insert("target".to_owned(), metadata.target().into());
    if let Some(message) = fields.0.remove("message") {
        object.insert("message".to_owned(), message);
    }
    if !fields.0.is_empty() {
        object.insert("fields".to_owned(), Value::Object(fields.0));
    }
    Value::Object(object)
}

/// An event's fields by name.
#[derive(Debug, Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0
            .insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}
