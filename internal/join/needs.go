package join

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// agentContainer is the name of the agent's container.
const agentContainer = "controller"

// typeOf returns an empty object of the type of one of the manifest's documents.
func typeOf(document map[string]any) any {
	kind, _ := document["kind"].(string)
	switch kind {
	case "Namespace":
		return &corev1.Namespace{}
	case "ServiceAccount":
		return &corev1.ServiceAccount{}
	case "ClusterRole":
		return &rbacv1.ClusterRole{}
	case "ClusterRoleBinding":
		return &rbacv1.ClusterRoleBinding{}
	case "Service":
		return &corev1.Service{}
	case "Deployment":
		return &appsv1.Deployment{}
	default:
		return &corev1.Secret{}
	}
}

// checkPatched says what a document of an agent's manifest lacks after a patch of that which the agent, or its removal,
// relies on.
func checkPatched(original, changed map[string]any) error {
	was, is := unstructured.Unstructured{Object: original}, unstructured.Unstructured{Object: changed}
	if was.GroupVersionKind() != is.GroupVersionKind() || was.GetNamespace() != is.GetNamespace() || was.GetName() != is.GetName() {
		return errors.New("apiVersion, kind, name and namespace must stay, since the agent relies on them")
	}
	if is.GetLabels()[agentNameLabel] != agentName {
		return fmt.Errorf("label %s=%s must stay, since the agent relies on it when it leaves", agentNameLabel, agentName)
	}
	before, after := typeOf(original), typeOf(changed)
	if err := decodeStrictly(original, before); err != nil {
		return err
	}
	if err := decodeStrictly(changed, after); err != nil {
		return fmt.Errorf("it is not valid any more: %w", err)
	}
	switch after := after.(type) {
	case *corev1.Secret:
		return checkSecret(before.(*corev1.Secret), after)
	case *rbacv1.ClusterRoleBinding:
		return checkBinding(before.(*rbacv1.ClusterRoleBinding), after)
	case *appsv1.Deployment:
		return checkDeployment(before.(*appsv1.Deployment), after)
	}
	return nil
}

func decodeStrictly(document map[string]any, into any) error {
	raw, err := json.Marshal(document)
	if err != nil {
		return fmt.Errorf("encode it: %w", err)
	}
	return yaml.UnmarshalStrict(raw, into)
}

func checkSecret(before, after *corev1.Secret) error {
	_, twice := after.StringData[KubeconfigKey]
	if twice || !reflect.DeepEqual(before.Data[KubeconfigKey], after.Data[KubeconfigKey]) {
		return fmt.Errorf("key %s must stay: it is the agent's way to the hub", KubeconfigKey)
	}
	if after.Immutable != nil && *after.Immutable {
		return errors.New("it must not be immutable: the agent renews what is in it")
	}
	return nil
}

func checkBinding(before, after *rbacv1.ClusterRoleBinding) error {
	if after.RoleRef != before.RoleRef {
		return errors.New("roleRef must stay, since the agent relies on it")
	}
	for _, subject := range before.Subjects {
		if !slices.Contains(after.Subjects, subject) {
			return fmt.Errorf("subject %s %s/%s must stay, since the agent relies on it", subject.Kind, subject.Namespace, subject.Name)
		}
	}
	return nil
}

func checkDeployment(before, after *appsv1.Deployment) error {
	was, is := before.Spec, after.Spec
	if is.Replicas == nil || *is.Replicas != *was.Replicas || is.Strategy.Type != was.Strategy.Type {
		return fmt.Errorf("replicas: %d and strategy %s must stay: two agents would work on the same objects", *was.Replicas, was.Strategy.Type)
	}
	if is.Template.Spec.ServiceAccountName != was.Template.Spec.ServiceAccountName {
		return fmt.Errorf("serviceAccountName must stay %s: no other one has the rights", was.Template.Spec.ServiceAccountName)
	}
	if is.Selector == nil || !labels.SelectorFromSet(is.Selector.MatchLabels).Matches(labels.Set(is.Template.Labels)) {
		return errors.New("the selector must match the labels of the template")
	}
	return checkArguments(before, after)
}

// checkArguments compares the arguments by which the agent knows whose it is.
func checkArguments(before, after *appsv1.Deployment) error {
	now := argumentsOf(after)
	if now == nil {
		return fmt.Errorf("container %s must stay, with arguments", agentContainer)
	}
	for _, argument := range argumentsOf(before) {
		flag, _, isFlag := strings.Cut(argument, "=")
		if flag == "--diagnostics-address" || flag == "--v" || flag == "--version" {
			continue
		}
		others := func(arg string) bool {
			return isFlag && arg != argument && (arg == flag || strings.HasPrefix(arg, flag+"="))
		}
		if !slices.Contains(now, argument) || slices.ContainsFunc(now, others) {
			return fmt.Errorf("argument %s of container %s must stay, since the agent relies on it", argument, agentContainer)
		}
	}
	return nil
}

func argumentsOf(deployment *appsv1.Deployment) []string {
	for _, container := range deployment.Spec.Template.Spec.Containers {
		if container.Name == agentContainer {
			return container.Args
		}
	}
	return nil
}
