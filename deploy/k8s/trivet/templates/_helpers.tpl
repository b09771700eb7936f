{{/* Names, labels and the fixed points that every template shares. */}}

{{- define "trivet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "trivet.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Called with (dict "root" $ "component" "rollout"). */}}
{{- define "trivet.componentSelector" -}}
{{ include "trivet.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "trivet.labels" -}}
{{ include "trivet.selector" .root }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Called with (dict "root" $ "image" .Values.rollout.image). */}}
{{- define "trivet.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "trivet.secretName" -}}
{{- .Values.secrets.existingSecret | default (include "trivet.fullname" .) -}}
{{- end -}}

{{- define "trivet.run" -}}
{{- dig "run" "name" "" .Values.config -}}
{{- end -}}

{{/* Not empty where versions go from the trainer's GPUs to the rollouts' (config.weights.transfer). */}}
{{- define "trivet.transfersWeights" -}}
{{- if ne (dig "weights" "transfer" "disk" .Values.config) "disk" -}}true{{- end -}}
{{- end -}}

{{- define "trivet.trainerJob" -}}
{{- printf "%s-trainer" (include "trivet.fullname" .) -}}
{{- end -}}

{{/* The headless Service that gives each trainer pod a name of its own. */}}
{{- define "trivet.trainerNodes" -}}
{{- printf "%s-trainer-nodes" (include "trivet.fullname" .) -}}
{{- end -}}

{{/* Ranks on one node: one for each GPU, or what processesPerNode says. */}}
{{- define "trivet.trainerProcesses" -}}
{{- .Values.trainer.processesPerNode | default (max .Values.trainer.gpusPerNode 1) -}}
{{- end -}}

{{- define "trivet.redisAddress" -}}
{{- if .Values.redis.enabled -}}
{{- printf "%s-redis.%s.svc:6379" (include "trivet.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- .Values.redis.external.address -}}
{{- end -}}
{{- end -}}

{{- define "trivet.claim" -}}
{{- $volume := index .root.Values.storage .name -}}
{{- $volume.existingClaim | default (printf "%s-%s" (include "trivet.fullname" .root) .name) -}}
{{- end -}}

{{/* A path as the containers see it: the images work in /srv/trivet. */}}
{{- define "trivet.path" -}}
{{- ternary . (printf "/srv/trivet/%s" .) (hasPrefix "/" .) -}}
{{- end -}}

{{/* "true" where the model is a directory, "" where it is a hub id. */}}
{{- define "trivet.localModel" -}}
{{- $path := dig "model" "path" "" .Values.config -}}
{{- if or (hasPrefix "/" $path) (hasPrefix "models/" $path) -}}true{{- end -}}
{{- end -}}

{{- define "trivet.blobsOnRunVolume" -}}
{{- if hasPrefix "file://" (dig "blobs" "url" "redis" .Values.config) -}}true{{- end -}}
{{- end -}}

{{- define "trivet.checksum" -}}
{{ toYaml .Values.config | sha256sum }}
{{- end -}}

{{/* JSON lists. A run that learns from preferences of a file needs the trainer alone. */}}
{{- define "trivet.services" -}}
{{- if dig "data" "preferences" "" .Values.config -}}["trainer"]{{- else -}}["rollout","reward","trainer"]{{- end -}}
{{- end -}}

{{- define "trivet.pods" -}}
{{- $pods := include "trivet.services" . | fromJsonArray -}}
{{- if has "rollout" $pods -}}
{{- $pods = append $pods "test" -}}
{{- if .Values.redis.enabled -}}{{- $pods = append $pods "redis" -}}{{- end -}}
{{- end -}}
{{- if .Values.config.prepare -}}{{- $pods = append $pods "prepare" -}}{{- end -}}
{{- toJson $pods -}}
{{- end -}}
