// Renders the templates of a chart as helm does: Go's text/template with Sprig's functions, and those that Helm adds.
// Arguments: the chart's folder. Standard input: {"values", "release", "chart"} as JSON. Standard output: the files, by path, as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type files string

func (folder files) Get(name string) string {
	text, _ := os.ReadFile(filepath.Join(string(folder), name))
	return string(text)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	folder := os.Args[1]
	var given map[string]interface{}
	check(json.NewDecoder(os.Stdin).Decode(&given))
	root := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	functions["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := root.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	functions["toYaml"] = func(value interface{}) string {
		text, err := yaml.Marshal(value)
		check(err)
		return strings.TrimSuffix(string(text), "\n")
	}
	root.Funcs(functions)
	paths, err := filepath.Glob(filepath.Join(folder, "templates", "*"))
	check(err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		check(err)
		_, err = root.New(filepath.Base(path)).Parse(string(text))
		check(err)
	}
	data := map[string]interface{}{
		"Values": given["values"], "Release": given["release"], "Chart": given["chart"], "Files": files(folder),
	}
	rendered := map[string]string{}
	for _, path := range paths {
		if name := filepath.Base(path); !strings.HasPrefix(name, "_") {
			var text strings.Builder
			check(root.ExecuteTemplate(&text, name, data))
			rendered[name] = strings.ReplaceAll(text.String(), "<no value>", "")
		}
	}
	check(json.NewEncoder(os.Stdout).Encode(rendered))
}
