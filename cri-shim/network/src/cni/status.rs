//! Whether a network's plugins are ready for pods: their answers to STATUS, cached for a while, as
//! kubelets ask every few seconds and others may ask as well.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::chain;
use super::config::List;
use super::error::CniError;

/// How long an answer is valid.
const CACHE_TTL: Duration = Duration::from_secs(5);

/// The time limit of one plugin.
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The last answer.
#[derive(Debug, Default)]
pub(super) struct Status(Mutex<Option<Answer>>);

#[derive(Debug)]
struct Answer {
    /// The list whose plugins gave it.
    list: Arc<List>,
    at: Instant,
    result: Result<(), Arc<CniError>>,
}

impl Status {
    /// Asks the plugins of the node's present list; those of older versions of CNI do not support
    /// it and count as ready.
    pub(super) async fn of(
        &self,
        list: &Arc<List>,
        plugin_dirs: &[PathBuf],
    ) -> Result<(), Arc<CniError>> {
        if !list.has_status() {
            return Ok(());
        }
        // Concurrent callers wait for the same answer.
        let mut last = self.0.lock().await;
        if let Some(answer) = &*last
            && Arc::ptr_eq(&answer.list, list)
            && answer.at.elapsed() < CACHE_TTL
        {
            return answer.result.clone();
        }
        let result = chain::status(list, plugin_dirs, PLUGIN_TIMEOUT).await;
        let result = result.map_err(Arc::new);
        *last = Some(Answer {
            list: Arc::clone(list),
            at: Instant::now(),
            result: result.clone(),
        });
        result
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::cni::config::parse;
    use crate::cni::plugin::write_script;

    /// A list with a plugin that records its calls in `dir`, and is not ready while a file `down`
    /// exists.
    fn list(dir: &Path, version: &str) -> Arc<List> {
        let script = format!(
            r#"cd {}; cat >config; env >env; echo >>asked
               [ -e down ] || exit 0
               echo '{{"cniVersion":"1.1.0","code":50,"msg":"no agent"}}'; exit 1"#,
            dir.display()
        );
        write_script(dir, "script", &script);
        let plugins = json!([{"type": "script", "mtu": 1400}]);
        let list = json!({"cniVersion": version, "name": "test", "plugins": plugins});
        Arc::new(parse(list.to_string().as_bytes(), true).unwrap())
    }

    #[tokio::test]
    async fn plugins_are_asked_whether_they_are_ready_and_not_too_often() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let (status, dirs) = (Status::default(), [dir.path().to_owned()]);
        let list = list(dir.path(), "1.1.0");
        status.of(&list, &dirs).await.unwrap();
        tokio::time::pause();
        let config: Value = serde_json::from_str(&read("config")).unwrap();
        let whole = json!({"type": "script", "mtu": 1400, "cniVersion": "1.1.0", "name": "test"});
        assert_eq!(config, whole);
        let env = read("env");
        assert!(env.contains("CNI_COMMAND=STATUS\n"), "{env}");
        for variable in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"] {
            assert!(!env.contains(variable), "{env}");
        }

        fs::write(dir.path().join("down"), "").unwrap();
        status.of(&list, &dirs).await.unwrap();
        assert_eq!(read("asked"), "\n");
        tokio::time::advance(CACHE_TTL).await;
        tokio::time::resume();
        let error = status.of(&list, &dirs).await.unwrap_err().to_string();
        assert!(
            error.contains("\"script\" is not ready: no agent"),
            "{error}"
        );
        // Another list is asked immediately.
        fs::remove_file(dir.path().join("down")).unwrap();
        status
            .of(&Arc::new(List::clone(&list)), &dirs)
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn plugins_of_older_versions_are_not_asked() {
        let dir = tempfile::tempdir().unwrap();
        for version in ["0.3.1", "0.4.0", "1.0.0"] {
            let list = list(dir.path(), version);
            let status = Status::default();
            status.of(&list, &[dir.path().to_owned()]).await.unwrap();
        }
        assert!(!dir.path().join("asked").exists());
    }
}
