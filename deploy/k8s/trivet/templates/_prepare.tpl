{{/* The prepare Job below metadata. */}}
{{- define "trivet.prepareSpec" -}}
{{- $values := merge (dict "image" .Values.trainer.image) .Values.prepare -}}
{{- $context := dict "root" . "component" "prepare" "values" $values -}}
backoffLimit: 3
template:
  metadata:
    labels:
      {{- include "trivet.componentSelector" $context | nindent 6 }}
  spec:
    {{- include "trivet.podSpec" $context | nindent 4 }}
    restartPolicy: OnFailure
    containers:
      - name: prepare
        {{- include "trivet.container" (dict "root" . "values" $values) | nindent 8 }}
        # Others wait for the mark: what is half written is not there yet.
        command: [/bin/sh, -ec, 'python3 prepare.py --config /etc/trivet/config/trivet.yaml; touch "$1"', prepare]
        args: [{{ include "trivet.prepareMark" . | quote }}]
        env:
          {{- include "trivet.environment" $context | trim | nindent 10 }}
        resources:
          {{- include "trivet.resources" (dict "root" . "resources" $values.resources "gpus" $values.gpus) | nindent 10 }}
        volumeMounts:
          {{- include "trivet.mounts" $context | nindent 10 }}
    volumes:
      {{- include "trivet.volumes" $context | nindent 6 }}
{{- end -}}
