{{/* Combinations that cannot work fail here, each with a sentence. */}}
{{- define "trivet.validate" -}}
{{- $config := .Values.config -}}
{{- $nodes := int .Values.trainer.nodes -}}
{{- $processes := int (include "trivet.trainerProcesses" .) -}}
{{- if not $config -}}
{{- fail "config is empty: it takes the run's YAML, with at least run, model and data (values-cpu.yaml has a whole one)" -}}
{{- else -}}
{{- if dig "redis" "url" "" $config -}}
{{- fail "config.redis.url is set, expected nothing: an address with a password belongs into a Secret (secrets.existingSecret, key redis-url), and the chart's own Redis needs none" -}}
{{- end -}}
{{- if ne (dig "run" "directory" "runs" $config) "runs" -}}
{{- fail (printf "config.run.directory is %s, expected runs: there the volume of storage.runs is" $config.run.directory) -}}
{{- end -}}
{{- range $service := list "rollout" "reward" "trainer" -}}
{{- if dig $service "server" "" $config -}}
{{- fail (printf "config.%s.server is set, expected nothing: addresses and tokens are the chart's" $service) -}}
{{- end -}}
{{- end -}}

{{- if and .Values.singleNode (gt $nodes 1) -}}
{{- fail (printf "trainer.nodes is %d while singleNode is true, expected 1: all pods share one node" $nodes) -}}
{{- end -}}
{{- if and (not .Values.singleNode) (ne .Values.storage.runs.accessMode "ReadWriteMany") -}}
{{- fail (printf "storage.runs.accessMode is %s, expected ReadWriteMany: trainer and rollouts on several nodes share weights and checkpoints; with a volume that one node mounts, set singleNode" .Values.storage.runs.accessMode) -}}
{{- end -}}
{{- if and .Values.storage.inputs.enabled (not .Values.singleNode) (eq .Values.storage.inputs.accessMode "ReadWriteOnce") -}}
{{- fail "storage.inputs.accessMode is ReadWriteOnce, expected ReadWriteMany or ReadOnlyMany: trainer and rollouts on several nodes read it; with a volume that one node mounts, set singleNode" -}}
{{- end -}}

{{- $model := $config.model.path -}}
{{- if include "trivet.localModel" . -}}
{{- $where := include "trivet.path" $model -}}
{{- if and (hasPrefix "/srv/trivet/models/" $where) (not .Values.storage.inputs.enabled) -}}
{{- fail (printf "config.model.path is %s while storage.inputs.enabled is false: there is no such volume" $model) -}}
{{- end -}}
{{- if and (hasPrefix "/" $where) (not (hasPrefix "/srv/trivet/" $where)) (not .Values.rollout.extraVolumeMounts) -}}
{{- fail (printf "config.model.path is %s, expected a directory under models/, a hub id, or a volume of your own in extraVolumes and extraVolumeMounts" $model) -}}
{{- end -}}
{{- else if and .Values.networkPolicy.enabled (not .Values.networkPolicy.allowHttps) -}}
{{- fail (printf "config.model.path is %s, a hub id, and the network policies let nothing out: set networkPolicy.allowHttps, or put the model on storage.inputs and name it by models/..." $model) -}}
{{- end -}}
{{- if eq (dig "weights" "transfer" "disk" $config) "ipc" -}}
{{- fail "config.weights.transfer is ipc, expected disk or nccl: the pods of trainer and rollouts share neither shared memory nor process ids, which a GPU's memory is opened by" -}}
{{- end -}}
{{- $blobs := dig "blobs" "url" "redis" $config -}}
{{- if and (hasPrefix "file://" $blobs) (not (hasPrefix "file:///srv/trivet/runs/" $blobs)) -}}
{{- fail (printf "config.blobs.url is %s, expected a directory under file:///srv/trivet/runs/, which rollouts and trainer share" $blobs) -}}
{{- end -}}
{{- with $config.prepare -}}
{{- $creates := include "trivet.path" .creates -}}
{{- $writable := and $.Values.storage.inputs.enabled (ne $.Values.storage.inputs.accessMode "ReadOnlyMany") -}}
{{- if not (or (hasPrefix "/srv/trivet/models/" $creates) (hasPrefix "/srv/trivet/data/" $creates) (hasPrefix "/srv/trivet/runs/" $creates)) -}}
{{- fail (printf "config.prepare.creates is %s, expected a path under models/, data/ or runs/: elsewhere it would end with the pod that makes it" .creates) -}}
{{- end -}}
{{- if and (not (hasPrefix "/srv/trivet/runs/" $creates)) (not $writable) -}}
{{- fail (printf "config.prepare.creates is %s, expected storage.inputs.enabled and an access mode that writes" .creates) -}}
{{- end -}}
{{- end -}}

{{- if and (eq (dig "trainer" "device" "auto" $config) "cuda") (eq (int .Values.trainer.gpusPerNode) 0) -}}
{{- fail "config.trainer.device is cuda while trainer.gpusPerNode is 0, expected at least 1" -}}
{{- end -}}
{{- if and (eq (dig "trainer" "device" "auto" $config) "cpu") (gt (int .Values.trainer.gpusPerNode) 0) -}}
{{- fail (printf "config.trainer.device is cpu while trainer.gpusPerNode is %d: the trainer would hold accelerators and not use them" (int .Values.trainer.gpusPerNode)) -}}
{{- end -}}
{{- if and (gt (int .Values.trainer.gpusPerNode) 0) (gt $processes (int .Values.trainer.gpusPerNode)) -}}
{{- fail (printf "trainer.processesPerNode is %d, expected at most trainer.gpusPerNode (%d): each rank needs an accelerator" $processes (int .Values.trainer.gpusPerNode)) -}}
{{- end -}}
{{- $shards := mul (dig "rollout" "engine" "tensor_parallel_size" 1 $config | int) (dig "rollout" "engine" "pipeline_parallel_size" 1 $config | int) -}}
{{- if and (gt (int .Values.rollout.gpus) 0) (ne (int $shards) (int .Values.rollout.gpus)) -}}
{{- fail (printf "rollout.gpus is %d, expected %d: config.rollout.engine's tensor_parallel_size times pipeline_parallel_size" (int .Values.rollout.gpus) (int $shards)) -}}
{{- end -}}

{{- range $service := list "rollout" "reward" -}}
{{- $scaling := (index $.Values $service).autoscaling -}}
{{- if ne $scaling.kind "none" -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d, expected at most maxReplicas (%d)" $service (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $scaling.kind "hpa") (eq (int $scaling.minReplicas) 0) -}}
{{- fail (printf "%s.autoscaling.minReplicas is 0 with kind hpa, expected at least 1: only KEDA scales to zero" $service) -}}
{{- end -}}
{{- if and (eq $scaling.kind "hpa") (not $scaling.metrics) -}}
{{- fail (printf "%s.autoscaling.metrics is empty, expected what the HorizontalPodAutoscaler goes by" $service) -}}
{{- end -}}
{{- end -}}
{{- if has "rollout" (include "trivet.services" . | fromJsonArray) -}}
{{- range $key, $patience := dict "trainer.batch_timeout_seconds" (dig "trainer" "batch_timeout_seconds" 1800 $config) "evaluation.timeout_seconds" (dig "evaluation" "timeout_seconds" 600 $config) -}}
{{- if ge (int $.Values.rollout.startSeconds) (int $patience) -}}
{{- fail (printf "rollout.startSeconds is %d, expected less than config.%s (%d): the trainer would give up before a rollout has loaded the model" (int $.Values.rollout.startSeconds) $key (int $patience)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if not .Values.redis.enabled -}}
{{- if not .Values.secrets.existingSecret -}}
{{- fail "redis.enabled is false and secrets.existingSecret is empty, expected a Secret whose key redis-url is the address of the Redis to use" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.redis.external.cidrs) -}}
{{- fail "redis.external.cidrs is empty while networkPolicy.enabled is true: the network policies would keep the services from Redis" -}}
{{- end -}}
{{- if and (or (eq .Values.rollout.autoscaling.kind "keda") (eq .Values.reward.autoscaling.kind "keda")) (not .Values.redis.external.address) -}}
{{- fail "redis.external.address is empty, expected host:port: KEDA asks Redis for the streams' lengths" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.rules.enabled (not (.Files.Get "files/rules.yml")) -}}
{{- fail "monitoring.rules.enabled is true, but the chart holds no files/rules.yml" -}}
{{- end -}}
{{- end -}}
{{- end -}}
