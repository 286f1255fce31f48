//! Disks that come and go while a VM runs, and dumps of its memory:
//! `/v1/NAMESPACE/NAME/UID/disks/…`, for the controller.
//!
//! | path | verb | does |
//! | --- | --- | --- |
//! | `plug` | PUT | plugs the claim of a pod in |
//! | `unplug` | PUT | takes the disk from the guest |
//! | `dump` | PUT | dumps the guest's memory to the claim of a pod, or says how far that is |

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use podvisor_node_api::messages::VmName;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{
    answers::{failure, limited},
    machines::Machines,
};
use crate::{
    contact::disks::{DumpRequest, PlugRequest, UnplugAnswer, UnplugRequest},
    https::{self, Answer},
    status::Failure,
};

/// What is asked about a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    vm: VmName,
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Plug,
    Unplug,
    Dump,
}

impl Asked {
    /// Reads a path; `None` if it is none of a disk.
    pub(super) fn read(method: &Method, path: &str) -> Option<Self> {
        let steps: Vec<&str> = path.strip_prefix("/v1/")?.split('/').collect();
        let [namespace, name, uid, "disks", what] = *steps.as_slice() else {
            return None;
        };
        if [namespace, name, uid].iter().any(|step| step.is_empty()) {
            return None;
        }
        let what = match (method, what) {
            (&Method::PUT, "plug") => What::Plug,
            (&Method::PUT, "unplug") => What::Unplug,
            (&Method::PUT, "dump") => What::Dump,
            _ => return None,
        };
        Some(Self {
            vm: VmName::new(namespace, name, uid),
            what,
        })
    }
}

/// Answers the controller.
pub(super) async fn answer(
    request: Request<Incoming>,
    asked: Asked,
    machines: &Machines,
) -> Result<Answer, Failure> {
    let Asked { vm, what } = asked;
    let body = match https::read_body(request.into_body()).await {
        Ok(body) => body,
        Err(answer) => return Ok(answer),
    };
    match what {
        What::Plug => {
            let with: PlugRequest = read(&body)?;
            let done = limited(machines.plug_disk(&vm, &with.pod_uid)).await;
            done.map_err(|refusal| failure(&refusal))?;
            Ok(https::accepted())
        }
        What::Unplug => {
            let with: UnplugRequest = read(&body)?;
            let done = machines.unplug_disk(&vm, &with.serial, with.limit_seconds);
            let is_forced = limited(done).await.map_err(|refusal| failure(&refusal))?;
            let answer = UnplugAnswer { is_forced };
            Ok(https::json(StatusCode::OK, &json!(answer)))
        }
        What::Dump => {
            let with: DumpRequest = read(&body)?;
            let answer = limited(machines.dump(&vm, with)).await;
            let answer = answer.map_err(|refusal| failure(&refusal))?;
            Ok(https::json(StatusCode::OK, &json!(answer)))
        }
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    let read = serde_json::from_slice(body);
    read.map_err(|error| Failure::bad_request(format!("the request is invalid: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_vm_and_a_disk() {
        let read = |method: Method, path: &str| Asked::read(&method, path);
        let asked = read(Method::PUT, "/v1/a/b/c/disks/plug").unwrap();
        assert_eq!(asked.vm, VmName::new("a", "b", "c"));
        assert_eq!(asked.what, What::Plug);
        let asked = read(Method::PUT, "/v1/a/b/c/disks/dump").unwrap();
        assert_eq!(asked.what, What::Dump);
        for path in [
            "/v1/a/b/c/disks",
            "/v1/a/b/c/disks/",
            "/v1/a/b//disks/plug",
            "/v1/a/b/c/disks/plug/more",
            "/v1/a/b/c/pause",
        ] {
            assert_eq!(read(Method::PUT, path), None, "{path}");
        }
        assert_eq!(read(Method::GET, "/v1/a/b/c/disks/plug"), None);
    }
}
