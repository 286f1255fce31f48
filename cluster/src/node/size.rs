//! CPUs and memory that come while a VM runs: a PUT of `/v1/NAMESPACE/NAME/UID/size`, for the
//! controller.

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use podvisor_node_api::messages::VmName;
use serde_json::json;

use super::{
    answers::{failure, limited},
    machines::Machines,
};
use crate::{
    contact::size::{ResizeAnswer, ResizeRequest},
    https::{self, Answer},
    status::Failure,
};

/// Reads a path; `None` if it is none of a VM's size.
pub(super) fn asked(method: &Method, path: &str) -> Option<VmName> {
    let steps: Vec<&str> = path.strip_prefix("/v1/")?.split('/').collect();
    let [namespace, name, uid, "size"] = *steps.as_slice() else {
        return None;
    };
    let is_named = [namespace, name, uid].iter().all(|step| !step.is_empty());
    (is_named && method == Method::PUT).then(|| VmName::new(namespace, name, uid))
}

/// Answers the controller.
pub(super) async fn answer(
    request: Request<Incoming>,
    vm: VmName,
    machines: &Machines,
) -> Result<Answer, Failure> {
    let body = match https::read_body(request.into_body()).await {
        Ok(body) => body,
        Err(answer) => return Ok(answer),
    };
    let with: Result<ResizeRequest, _> = serde_json::from_slice(&body);
    let with =
        with.map_err(|error| Failure::bad_request(format!("the request is invalid: {error}")))?;
    let done = limited(machines.resize(&vm, with.vcpus, with.memory)).await;
    let memory = done.map_err(|refusal| failure(&refusal))?;
    let answer = ResizeAnswer { memory };
    Ok(https::json(StatusCode::OK, &json!(answer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_vm_and_its_size() {
        let put = |path| asked(&Method::PUT, path);
        assert_eq!(put("/v1/a/b/c/size"), Some(VmName::new("a", "b", "c")));
        for path in [
            "/v1/a/b/c",
            "/v1/a//c/size",
            "/v1/a/b/c/size/more",
            "/v1/a/b/c/pause",
        ] {
            assert_eq!(put(path), None, "{path}");
        }
        assert_eq!(asked(&Method::GET, "/v1/a/b/c/size"), None);
    }
}
