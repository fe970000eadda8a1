//! What one test's tasks say in metrics, spans and events. Recorder and subscriber are those of the
//! test's thread, so the runtime must have one thread only; tests beside it are not heard.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Level, Subscriber, span};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

/// A span that began, or an event.
#[derive(Debug, Clone)]
pub(crate) struct Said {
    /// The span: itself, or the one around the event.
    pub(crate) span: Option<&'static str>,
    pub(crate) is_event: bool,
    pub(crate) level: Level,
    pub(crate) fields: BTreeMap<&'static str, String>,
}

/// What was heard.
#[derive(Debug, Clone)]
pub(crate) struct Heard {
    shown: PrometheusHandle,
    said: Arc<Mutex<Vec<Said>>>,
}

/// Hears as long as it lives.
pub(crate) struct Hearing {
    _recorder: metrics::LocalRecorderGuard<'static>,
    _subscriber: DefaultGuard,
    /// With one subscriber alone, a place in the code that another thread comes to first is asked
    /// for by that thread, which has none, and is silent for good.
    _beside: Dispatch,
}

/// Hears what is said on this thread.
pub(crate) fn hear() -> (Heard, Hearing) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let heard = Heard { shown: recorder.handle(), said: Arc::default() };
    let beside = Dispatch::new(Registry::default());
    let subscriber = Registry::default().with(Ear(Arc::clone(&heard.said)));
    let hearing = Hearing {
        _recorder: metrics::set_default_local_recorder(Box::leak(Box::new(recorder))),
        _subscriber: tracing::subscriber::set_default(subscriber),
        _beside: beside,
    };
    (heard, hearing)
}

impl Heard {
    /// The sum of a metric over the lines with these labels.
    pub(crate) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.values(name, labels).iter().sum()
    }

    /// Whether a metric has a line with these labels, also one that says 0.
    pub(crate) fn shows(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        !self.values(name, labels).is_empty()
    }

    fn values(&self, name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
        let labels: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let text = self.shown.render();
        let lines = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        let has =
            |line: &&str, label: &String| ["{", ","].iter().any(|before| line.contains(&format!("{before}{label}")));
        let ours = lines.filter(|line| labels.iter().all(|label| has(line, label)));
        ours.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).collect()
    }

    /// All that was said.
    pub(crate) fn said(&self) -> Vec<Said> {
        self.said.lock().unwrap().clone()
    }

    /// The events with these words, as their fields.
    pub(crate) fn events(&self, words: &str) -> Vec<BTreeMap<&'static str, String>> {
        let events = self.said().into_iter().filter(|said| said.is_event).map(|said| said.fields);
        events.filter(|fields| fields.get("message").is_some_and(|message| message.contains(words))).collect()
    }

    /// Spans of this name, as their fields.
    pub(crate) fn spans(&self, name: &str) -> Vec<BTreeMap<&'static str, String>> {
        let spans = self.said().into_iter().filter(|said| !said.is_event && said.span == Some(name));
        spans.map(|said| said.fields).collect()
    }
}

struct Ear(Arc<Mutex<Vec<Said>>>);

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

fn is_ours(target: &str) -> bool {
    target.starts_with("oncebox")
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Ear {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        let metadata = attributes.metadata();
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if is_ours(metadata.target()) {
            let (span, level) = (Some(metadata.name()), *metadata.level());
            self.0.lock().unwrap().push(Said { span, is_event: false, level, fields: fields.0 });
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if is_ours(event.metadata().target()) {
            let span = context.event_span(event).map(|span| span.name());
            self.0.lock().unwrap().push(Said {
                span,
                is_event: true,
                level: *event.metadata().level(),
                fields: fields.0,
            });
        }
    }
}
