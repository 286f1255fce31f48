//! What the controller has changed of a VM that runs, or taken of it:
//! `/v1/NAMESPACE/NAME/UID/…`, each a PUT.
//!
//! | path | does |
//! | --- | --- |
//! | `disks/plug` | plugs the claim of a pod in |
//! | `disks/unplug` | takes the disk from the guest |
//! | `disks/dump` | dumps the guest's memory to the claim of a pod |
//! | `size` | gives the guest CPUs and memory |
//! | `links` | gives its cards links, and takes them |

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
    contact::links::LinksRequest,
    contact::size::{ResizeAnswer, ResizeRequest},
    https::{self, Answer},
    status::Failure,
};

/// What is to be changed.
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
    Size,
    Links,
}

impl Asked {
    /// Reads a path; `None` if it is that of no change.
    pub(super) fn read(method: &Method, path: &str) -> Option<Self> {
        let steps: Vec<&str> = path.strip_prefix("/v1/")?.split('/').collect();
        let [namespace, name, uid, ref what @ ..] = *steps.as_slice() else {
            return None;
        };
        if method != Method::PUT || [namespace, name, uid].iter().any(|step| step.is_empty()) {
            return None;
        }
        let what = match *what {
            ["disks", "plug"] => What::Plug,
            ["disks", "unplug"] => What::Unplug,
            ["disks", "dump"] => What::Dump,
            ["size"] => What::Size,
            ["links"] => What::Links,
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
        What::Size => {
            let with: ResizeRequest = read(&body)?;
            let done = limited(machines.resize(&vm, with.vcpus, with.memory)).await;
            let memory = done.map_err(|refusal| failure(&refusal))?;
            let answer = ResizeAnswer { memory };
            Ok(https::json(StatusCode::OK, &json!(answer)))
        }
        What::Links => {
            let with: LinksRequest = read(&body)?;
            let done = limited(machines.set_links(&vm, with.down)).await;
            done.map_err(|refusal| failure(&refusal))?;
            Ok(https::accepted())
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
    fn a_path_names_a_vm_and_a_change() {
        let read = |method: Method, path: &str| Asked::read(&method, path);
        for (path, what) in [
            ("disks/plug", What::Plug),
            ("disks/unplug", What::Unplug),
            ("disks/dump", What::Dump),
            ("size", What::Size),
            ("links", What::Links),
        ] {
            let path = format!("/v1/a/b/c/{path}");
            let vm = VmName::new("a", "b", "c");
            assert_eq!(read(Method::PUT, &path), Some(Asked { vm, what }), "{path}");
            assert_eq!(read(Method::GET, &path), None, "{path}");
        }
        for path in [
            "/v1/a/b/c",
            "/v1/a/b/c/disks",
            "/v1/a/b/c/disks/",
            "/v1/a/b//disks/plug",
            "/v1/a/b/c/disks/plug/more",
            "/v1/a//c/size",
            "/v1/a/b/c/size/more",
            "/v1/a/b/c/pause",
        ] {
            assert_eq!(read(Method::PUT, path), None, "{path}");
        }
    }
}
